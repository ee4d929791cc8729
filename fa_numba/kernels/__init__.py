"""One algorithm a file: on CUDA cores (``simt``) and on tensor cores (``mma``)."""
