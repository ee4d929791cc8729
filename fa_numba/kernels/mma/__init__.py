from fa_numba.kernels.mma import fa1_forward, fa2_forward, standard, standard_backward

__all__ = ["fa1_forward", "fa2_forward", "standard", "standard_backward"]
