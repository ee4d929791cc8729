"""Kernels, one algorithm per file: on CUDA cores (``simt``), tensor cores (``mma``) and Hopper
(``wgmma``).

Comments name the line of the paper's algorithm at each step:

- ``Alg. 1 line 8`` is a line of Algorithm 1 in the paper that the file implements.
- ``FA-1 line 9, FA-2 line 8`` is a step that both loop orders have, so that both files contain the
  same comment. In the forward pass, these are lines of Algorithm 1 of each paper. In the backward
  pass, they are lines of Algorithm 4 of the FlashAttention paper, and of Algorithm 2 of the
  FlashAttention-2 paper.

A ``diff`` of the two files of a pass therefore shows what the second paper changed. In a kernel,
``load.q(...)`` calls the device function that ``make_q(spec)`` in ``parts/<unit>/load.py`` returns.
"""
