import subprocess
import sys

_PRELOAD = """
import sys, threading
from thermocline.utils.preload import preload_torch
{before}
preload_torch()
threads = [thread for thread in threading.enumerate() if thread.name == "thermocline-preload"]
for thread in threads:
    thread.join()
loaded = "libtorch_python.so" in open("/proc/self/maps").read()
print(len(threads), loaded, "torch" in sys.modules)
{after}
"""


def _run(before: str = "", after: str = "") -> str:
    code = _PRELOAD.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_libraries_are_loaded_before_torch_is_imported_and_torch_works_with_them():
    after = "import torch; print(int((torch.ones(3, 4) @ torch.ones(4, 1)).sum()))"
    assert _run(after=after).split() == ["1", "True", "False", "12"]


def test_nothing_is_loaded_where_torch_is_imported_or_missing():
    assert _run("import torch").split() == ["0", "True", "True"]
    missing = "import importlib.util as u; u.find_spec = lambda name: None"
    assert _run(missing).split() == ["0", "False", "False"]


def test_a_process_that_exits_at_once_waits_for_the_libraries_and_keeps_its_exit_code():
    code = "import sys; from thermocline.utils.preload import preload_torch; preload_torch(); sys.exit(2)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 2
