"""The disk of the soak: an ext4 image, mounted in a mount namespace of the soak's own, that a file can fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

IN_NAMESPACE = "THERMOCLINE_SOAK_NAMESPACE"
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


class Disk:
    """A folder for runs. `limited`: it is a small file system, so that it can be filled."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        """Mount the image of an earlier soak in this folder, or a new one."""
        self.folder = folder / "disk"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.problem = self._mount(folder / "disk.image", megabytes)
        """Why the disk cannot be filled; empty if it can."""
        self._ballast = self.folder / "ballast"
        self.free()

    def _mount(self, image: Path, megabytes: int) -> str:
        if os.environ.get(IN_NAMESPACE) != "1":
            return "no mount namespace"
        if shutil.which("mkfs.ext4") is None:
            return "mkfs.ext4 is not installed"
        commands = [["mount", "-o", "loop", str(image), str(self.folder)]]
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(megabytes << 20)
            commands.insert(0, ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{' '.join(command)}: {done.stderr.strip()}"
        return ""

    def fill(self, left: int) -> None:
        """Fill the disk up to about `left` bytes, while other processes write to it."""
        status = os.statvfs(self.folder)
        piece, size = 1 << 30, 0
        with self._ballast.open("wb") as file:
            while piece >= 4096:
                want = min(piece, status.f_bavail * status.f_frsize - left - size)
                try:
                    os.posix_fallocate(file.fileno(), size, max(want, 4096))
                except OSError:
                    piece //= 2
                else:
                    size += max(want, 4096)
                    if want < piece:
                        return

    def free(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink(missing_ok=True)

    def used(self, name: str) -> int:
        """Return the bytes that the files of a lane occupy."""
        total = 0
        for folder, _, files in os.walk(self.folder / name):
            for file in files:
                try:
                    total += os.lstat(os.path.join(folder, file)).st_blocks * 512
                except FileNotFoundError:  # deleted meanwhile
                    continue
        return total


def enter_namespace(command: list[str]) -> None:
    """Replace this process by the same command in a new mount namespace; return if that is not possible."""
    if os.environ.get(IN_NAMESPACE) or shutil.which("unshare") is None:
        return
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0:
        os.execvpe(NAMESPACE[0], [*NAMESPACE, *command], {**os.environ, IN_NAMESPACE: "1"})
