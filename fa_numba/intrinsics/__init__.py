"""Inline PTX and LLVM behind one-instruction functions, each with its emulation beside it.

A kernel calls these like any device function. On the GPU each becomes one instruction; on the
emulator the function attached as ``emulation`` runs instead and defines the semantics.
"""
