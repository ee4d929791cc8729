"""What compiled code is taken from, without a compiler."""

from types import SimpleNamespace

import pytest

from fa_numba.device import linking


@pytest.mark.parametrize(
    ("capability", "cc", "arch", "target"),
    [
        ((7, 5), (7, 5), "sm_75", "sm_75"),
        ((8, 6), (8, 6), "sm_86", "sm_86"),
        ((9, 0), (9, 0, "a"), "sm_90a", "sm_90a"),
        ((12, 0), (9, 0), "sm_90", "sm_120"),
    ],
)
def test_numba_compiles_for_the_gpu_and_the_threads_of_a_kernel(
    monkeypatch, capability, cc, arch, target
):
    given = []

    def compile_(*args, **how):
        given.append((*args, how))
        return b"LTO", None

    monkeypatch.setattr(linking.cuda, "compile", compile_)

    def link(code, kind, arch, **options):
        assert (kind, arch, options) == ("ptx", "sm_90", {"ptx": True} | linking._OPTIMISED)
        return b"PTX of " + code, "log"

    monkeypatch.setattr(linking, "_linked", link)
    kernel = SimpleNamespace(function="f", signature="s", threads=128, min_blocks=2)
    found = linking.compiled(kernel, capability)
    how = {"device": False, "abi": "numba", "output": "ltoir", "launch_bounds": (128, 2)}
    assert given == [("f", "s", {"cc": cc} | how)]
    code = {"ltoir": b"LTO"} if capability < (12, 0) else {"ptx": b"PTX of LTO"}
    assert found == linking.Compiled(arch, target, **code)


@pytest.mark.parametrize(
    "code, linked",
    [
        (linking.Compiled("sm_80", "sm_86", ltoir=b"LTO"), [(b"LTO", "ptx", "sm_80")]),
        (linking.Compiled("sm_90", "sm_120", ptx=b"PTX of \xff"), []),
    ],
)
def test_ptx_machine_code_and_the_log_of_its_assembler(monkeypatch, code, linked):
    """The PTX is of the architecture of the compiler, and the machine code is of the GPU's."""
    found = []

    def link(code, kind, arch, **options):
        found.append((code, kind, arch))
        assert options.get("ptx", False) is (kind == "ptx")
        # PTX from LTO-IR is optimised. The log says what a kernel takes, such as spills.
        assert (options.items() >= linking._OPTIMISED.items()) is (code == b"LTO")
        if kind == "cubin":
            assert options["verbose"] and options["ptxas_options"] == ["-v"]
        return (b"PTX of \xff" if kind == "ptx" else b"cubin"), "log"

    monkeypatch.setattr(linking, "_linked", link)
    monkeypatch.setattr(linking, "compiled", lambda kernel, capability: code)
    assert linking.ptx_and_cubin("kernel", (8, 6)) == ("PTX of \ufffd", b"cubin", "log")
    assert found == [*linked, (code.ltoir or code.ptx, "cubin", code.target)]
