"""What compiled code is taken from, without a compiler."""

import pytest

from fa_numba.device import linking


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
