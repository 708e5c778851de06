from pyg_scale_template.check import check


def test_says_what_is_wrong_and_how_to_fix_it(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    found = check()
    assert not found.ok
    assert "/nowhere" in found.detail
    assert "TMPDIR" in found.fix
