"""Device functions of one PTX instruction each, with a Python emulation of the instruction.

A kernel calls an intrinsic like any device function. On a GPU, the call becomes one instruction
(inline PTX or LLVM). On the emulator, the function in the attribute ``emulation`` runs instead, and
defines the meaning.
"""
