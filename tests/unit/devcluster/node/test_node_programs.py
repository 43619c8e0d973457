"""Programs stay in reach when a volume is mounted over the folder that they lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_devcluster.node.processes.container_root import Mount
from trainium_devcluster.node.processes.programs import program_folders, shown_again

if TYPE_CHECKING:
    from pathlib import Path


def test_the_programs_are_the_environment_its_interpreter_and_editable_sources(tmp_path: Path) -> None:
    bin_folder, base, source = tmp_path / "venv/bin", tmp_path / "base/bin", tmp_path / "checkout/contract"
    for folder in (bin_folder, base, source, tmp_path / "venv/lib/site-packages"):
        folder.mkdir(parents=True)
    (base / "python3").touch()
    (bin_folder / "python").symlink_to(base / "python3")

    found = program_folders(bin_folder, [str(source), str(tmp_path / "venv/lib/site-packages"), "", "/no/such.zip"])

    assert found == tuple(sorted(str(one) for one in (tmp_path / "venv", tmp_path / "base", source)))


def test_what_an_own_volume_hides_is_shown_again_and_nothing_else() -> None:
    volumes = [
        Mount("/state/pods/1/volumes/tmp", "/tmp"),
        Mount("/data", "/srv"),
        Mount("/state/pods/1/volumes/x", "/opt/venv/x"),
    ]

    found = shown_again(volumes, ["/tmp/checkout/.venv", "/srv/venv", "/opt/venv"], "/state")

    assert found == (Mount("/tmp/checkout/.venv", "/tmp/checkout/.venv", read_only=True),)
