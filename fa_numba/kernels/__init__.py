"""One algorithm a file: on CUDA cores (``simt``), on tensor cores (``mma``) and on Hopper's
(``wgmma``).

Comments name the paper's line at each step. ``Alg. 1 line 8`` is of the file's own paper.
``FA-1 line 9, FA-2 line 8`` is a step that both orders take and both files have: in the forward
pass of Algorithm 1 of either paper, in the backward pass of Algorithm 4 of FlashAttention's and
Algorithm 2 of FlashAttention-2's. So ``diff`` of two files shows what the second paper changed.
``load.q(...)`` is what ``make_q(spec)`` of the unit's ``parts/<unit>/load.py`` makes.
"""
