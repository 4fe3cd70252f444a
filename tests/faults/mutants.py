"""Mutation test: plants known bugs in a copy of the C++ sources, one at a time, and counts those that tests detect.

    python tests/faults/mutants.py [--folder FOLDER] [NAME...]

FOLDER keeps the copy and its build for the next call, which then compiles only what differs and does not repeat the
tests without a bug. A test suite that passes without an fsync would prove nothing. Run by `make test-faults`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bugs_in_changes import CHANGES
from bugs_in_guards import STORE
from planted_bugs import CppMutant, Mutant, chosen, plant

ROOT = Path(__file__).parents[2]
# Fast suites first: they detect most bugs. A suite that times out counts as a detection.
SUITES = [
    *("Horizon.", "PosixFs.", "SyncFiles.", "PublishFile.", "StoreMerges.", "DramWriteAhead."),
    *("StoreCrash.", "StoreFuzz."),
    *("StoreGet.", "StoreKeyPieces.", "StoreRead", "StoreIo.", "StoreEngine.", "StoreDamage.", "StoreCorrupt."),
    *("StoreRepair.", "StoreManifest.", "StoreFilesFuzz.", "FaultsCorrupt.Misdirected", "FaultsCorrupt.EveryBit"),
    *("FaultsCorrupt.TornPages", "FaultsCrash.", "FaultsIo.", "FaultsFuzz."),
]
CLEAN_LIMIT, BUG_LIMIT = 7200.0, 900.0
"""Seconds of a suite without a bug, and with one."""
SLOWER = 10
"""A suite with a bug may take this many times as long as without: on a busy machine, slowness is no detection."""


MUTANTS = [
    *STORE,
    *CHANGES,
    Mutant(
        "a read error is not repeated",
        "util/posix_file.cc",
        "retries < kRetryAfter.size()",
        "retries > kRetryAfter.size()",
    ),
    Mutant(
        "an unreadable old manifest blocks opening",
        "ssd/catalog.cc",
        "      if (!is_unreadable(e)) throw;\n      damaged(epoch, e.what());\n",
        "      throw;\n",
    ),
    Mutant(
        "damaged files are linked through a symbolic link",
        "util/posix_fs.cc",
        "O_RDONLY | O_DIRECTORY | O_NOFOLLOW",
        "O_RDONLY | O_DIRECTORY",
    ),
    Mutant(
        "a check ends at the first damage",
        "ssd/check.cc",
        "    } catch (const CorruptionError& e) {\n      add(e);\n",
        "    } catch (const CorruptionError& e) {\n      if (found.empty()) add(e);\n",
    ),
    Mutant(
        "a copied log of a set-aside partition is dropped before its copy is indexed",
        "ssd/store_write.cc",
        "        bytes += append_buffer();\n      } catch",
        "      } catch",
    ),
    Mutant("commit does not sync data files", "ssd/store.cc", "      unsynced[i]->file->datasync();\n", ""),
    Mutant(
        "an append during a commit is marked as synced",
        "ssd/log_writer.cc",
        "  segment_->synced = false;\n",
        "",
    ),
    Mutant(
        "a file is marked as synced after puts of other threads",
        "ssd/store.cc",
        '      ctx.fs->failpoint("commit.file_synced");\n',
        '      ctx.fs->failpoint("commit.file_synced");\n      unsynced[i]->synced = true;\n',
    ),
    Mutant(
        "commit does not sync the folder before the manifest",
        "ssd/store.cc",
        "    ctx.fs->sync_dir(ctx.path);\n  } catch",
        "  } catch",
    ),
    Mutant("manifest is renamed before it is synced", "util/fs.cc", "      file->datasync();\n", ""),
    Mutant("folder is not synced after the rename", "util/fs.cc", "  fs.sync_dir(dir);\n", ""),
    Mutant(
        "a failed sync may be retried",
        "ssd/store.cc",
        "a second sync could succeed without the data.\n    fail(e.what());",
        "a second sync could succeed without the data.\n    throw;",
    ),
    Mutant(
        "a published version is not synced",
        "util/posix_file.cc",
        "    for (auto& file : files) file->datasync();\n",
        "",
    ),
    Mutant(
        "an error of fdatasync is ignored",
        "util/posix_file.cc",
        '  if (rc != 0) throw_errno(errno, "fdatasync',
        '  if (false) throw_errno(errno, "fdatasync',
    ),
    Mutant(
        "a read past the end succeeds",
        "util/posix_file.cc",
        "    if (n == 0) {\n",
        "    if (n == 0) return;\n    if (n == 0) {\n",
    ),
    Mutant(
        "page checksums are not compared",
        "ssd/format.cc",
        "  if (page_header(page).checksum ==",
        "  if (true || page_header(page).checksum ==",
    ),
    Mutant(
        "checksums do not depend on the page number",
        "ssd/format.h",
        "{ return nonce ^ mix64(page + 1); }",
        "{ return nonce + 0 * page; }",
    ),
    Mutant(
        "checksums do not depend on the file",
        "ssd/format.h",
        "{ return nonce ^ mix64(page + 1); }",
        "{ return 0 * nonce + mix64(page + 1); }",
    ),
    Mutant(
        "the manifest's checksum is not compared",
        "ssd/manifest.cc",
        "frame.check(stored == xxh64(",
        "frame.check(0 * stored == 0 * xxh64(",
    ),
    Mutant(
        "a damaged newest manifest is ignored",
        "ssd/catalog.cc",
        "    } catch (const CorruptionError& e) {\n      damaged(epoch, e.what());",
        "    } catch (const CorruptionError& e) {\n      epochs_.erase(epoch);",
    ),
    Mutant(
        "files of retained epochs are deleted", "ssd/catalog.cc", "    ++entry.epochs;\n", "    entry.epochs = 1;\n"
    ),
    Mutant(
        "release deletes files before its manifest is durably removed",
        "ssd/catalog.cc",
        "  ctx_.fs->sync_dir(ctx_.path);\n  {\n    std::lock_guard lock(mutex_);  // not during the sync",
        "  {\n    std::lock_guard lock(mutex_);  // not during the sync",
    ),
    Mutant(
        "files of a failed commit are deleted while its manifest exists",
        "ssd/catalog.cc",
        "      retain(manifest);\n    }\n    throw;",
        "    }\n    throw;",
    ),
    Mutant("extent numbers restart after opening", "ssd/store.cc", "  index_.start_at(m.next_seq);\n", ""),
    Mutant(
        "opening trusts a commit that is not durable",
        "ssd/store.cc",
        "    ctx.fs->sync_dir(path);  // the writer of the opened commit",
        "    // the writer of the opened commit",
    ),
    Mutant(
        "older versions in the log win",
        "ssd/index.cc",
        "(found && before(page, *vpage))",
        "(found && !before(page, *vpage))",
    ),
    Mutant(
        "a checkpoint's last name is not synced",
        "ssd/store.cc",
        "    ctx.fs->sync_dir(target);\n    sync_parent(*ctx.fs, target);",
        "    sync_parent(*ctx.fs, target);",
    ),
    Mutant(
        "row_bytes of STORE is not bounded",
        "ssd/format.h",
        "return row_bytes > 0 && row_bytes <= kMaxRowBytes && of(row_bytes).page_bytes == page_bytes;",
        "return page_bytes % kSector == 0 && page_bytes > 0;",
    ),
    Mutant(
        "the end of an extent is not compared with its segment",
        "ssd/manifest.cc",
        "    in.check(page <= m.segments[at].pages,",
        "    in.check(page > 0,",
    ),
    Mutant(
        "a repair keeps older versions of lost rows",
        "ssd/repair.cc",
        "return l->seq > seq && l->contains(hash);",
        "return false && l->seq > seq && l->contains(hash);",
    ),
    Mutant(
        "a repair renames a file that is not synced",
        "ssd/repair.cc",
        "    file->file->datasync();\n    ctx_.fs->rename(temp, path);",
        "    ctx_.fs->rename(temp, path);",
    ),
    Mutant(
        "a repair does not keep the damaged files",
        "ssd/repair.cc",
        "    for (const std::string& name : names) set_aside(name);\n",
        "",
    ),
    Mutant(
        "a repair writes all pages that a manifest states",
        "ssd/repair.cc",
        "      s.pages = end;\n      trimmed = true;\n",
        "",
    ),
    Mutant("two merges take one partition", "ssd/index.cc", " || p.merging) continue;", ") continue;"),
    Mutant(
        "extents are dropped while a merge reads them",
        "ssd/index.cc",
        "    if (p->pending > 0) merged = std::min(merged, p->merged_seq);\n  while",
        "    if (p->pending > 0 && !p->merging) merged = std::min(merged, p->merged_seq);\n  while",
    ),
    Mutant(
        "an error of a write behind is ignored",
        "ssd/files.cc",
        "  write_.get();\n",
        "  write_.wait();\n  write_ = {};\n",
    ),
    Mutant(
        "a failed merge does not count as ended",
        "ssd/merger.cc",
        "    index_.cancel_merge(running.merge);\n    end(running);\n  }\n  running.merge.view",
        "    index_.cancel_merge(running.merge);\n  }\n  running.merge.view",
    ),
    Mutant(
        "a row is evicted while it is written ahead",
        "dram/writeback.cc",
        "if (m.load_state() == SlotState::kWriting) {",
        "if (false && m.load_state() == SlotState::kWriting) {",
    ),
    Mutant(
        "flush does not wait for rows that are written ahead",
        "dram/writeback.cc",
        "  std::lock_guard ahead(write_ahead_mutex_);\n  const Scratch::Writeback w",
        "  const Scratch::Writeback w",
    ),
    Mutant(
        "rows of a failed write ahead stay clean",
        "dram/write_ahead.cc",
        "    if (!written) set_dirty(rows.slots[j]);\n",
        "",
    ),
    Mutant(
        "the look-ahead unpins a row that another batch of the window uses",
        "dram/horizon.cc",
        "    if (--e.uses > 0) continue;\n",
        "    --e.uses;\n",
    ),
    Mutant(
        "a batch of the look-ahead that is freed keeps its rows",
        "dram/horizon.h",
        "  ~HorizonBatch() { release(); }\n",
        "",
    ),
    Mutant(
        "a batch added during a visit counts as loaded by it",
        "dram/horizon.cc",
        "  batch->loaded_at_ = gathered_ + count_;\n",
        "  batch->loaded_at_ = position_ + 1;\n",
    ),
    Mutant(
        "dropping the look-ahead unpins the rows of a batch in training",
        "dram/horizon.cc",
        " kept.push_back(walk.partition() << 24 | walk.index());\n",
        " {}\n",
    ),
    Mutant(
        "the look-ahead of evaluation inserts initial rows",
        "dram/pull.cc",
        "  if (purpose == Purpose::kAheadOfRead) loading = drop_unknown(s, loading, slots);\n",
        "",
    ),
    Mutant(
        "a part that did not fit is not visited again",
        "dram/horizon.cc",
        "    put_back(part);\n    throw;\n",
        "    std::lock_guard sweep(sweep_mutex_);\n    end_part(part);\n    throw;\n",
    ),
    Mutant(
        "a repeated key is not found on its page again",
        "ssd/reader.cc",
        "      from = i;  // lookups",
        "      from = i + 1;  // lookups",
    ),
    Mutant(
        "keys that are not on their log page are not looked up on older pages",
        "ssd/reader.cc",
        "    if (!done->missed.empty()) {",
        "    if (false) {",
    ),
    Mutant(
        "a long read shares memory with a read in flight",
        "ssd/read_channel.h",
        "first &= free_ >> i;",
        "first &= free_ >> 0;",
    ),
    Mutant(
        "only the failed read is repeated, not the others in flight",
        "ssd/reader.cc",
        "      if (flight.part) again.push_back(std::exchange(flight, {}));",
        "      if (flight.part && again.empty()) again.push_back(std::exchange(flight, {}));",
    ),
    Mutant(
        "a piece of repeated keys has no bound",
        "ssd/key_pieces.cc",
        "std::min<size_t>(*begin + kMostKeys, ends_[group_])",
        "std::max<size_t>(*begin, ends_[group_])",
    ),
    Mutant(
        "the lowest cost of the device is kept for good",
        "ssd/read_cost.cc",
        "  const double weight = probes_++ == 0 ? 1.0 : kWeight;",
        "  const double weight = probes_++ == 0 ? 1.0 : measured->read_us < cost_.read_us ? kWeight : 0.0;",
    ),
]


def suites_of(mutant: Mutant) -> list[str]:
    """Return the tests that have to detect a mutant: its own, or any."""
    return [mutant.tests] if isinstance(mutant, CppMutant) else SUITES


class Copy:
    """A copy of the C++ sources with its own build folder. An existing copy is brought up to date."""

    def __init__(self, folder: Path) -> None:
        self.csrc = folder / "csrc"
        self.build_dir = folder / "build"
        self.clean_at = folder / "clean"
        self.digest = hashlib.sha256()
        self.seconds: dict[str, float] = {}  # of each suite without a bug
        files = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
        for path in [ROOT / "CMakeLists.txt", *files]:
            self.update(path.relative_to(ROOT), folder)
        for path in self.csrc.rglob("*"):
            if path.is_file() and not (ROOT / path.relative_to(folder)).exists():
                path.unlink()
        if not (folder / "tests").exists():
            (folder / "tests").symlink_to(ROOT / "tests")  # has the corpora of fuzz tests
        options = ["-DTHERMOCLINE_BIND=OFF", "-DTHERMOCLINE_TESTS=ON", "-DTHERMOCLINE_ONLY=util;ssd;dram"]
        fast = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", *(["-G", "Ninja"] if shutil.which("ninja") else [])]
        configure = ["cmake", "-S", str(folder), "-B", str(self.build_dir), *options, *fast]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)

    def update(self, name: Path, folder: Path) -> None:
        """Copy a file if it differs, so that nothing else is compiled again, and add it to the digest."""
        data = (ROOT / name).read_bytes()
        self.digest.update(f"{name} {len(data)}\n".encode() + data)
        target = folder / name
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def passes_clean(self, suites: list[str]) -> str:
        """Return the first failing test without a bug; empty if all pass, or have passed with these sources."""
        kept = self.clean_at.read_text().splitlines() if self.clean_at.exists() else []
        digest = self.digest.hexdigest()
        passed = dict(line.split() for line in kept[1:]) if kept[:1] == [digest] else {}
        self.build()
        for suite in suites:
            if suite not in passed:
                start = time.monotonic()
                if reason := self.first_failure([suite]):
                    return reason
                passed[suite] = f"{time.monotonic() - start:.1f}"
                lines = [f"{name} {seconds}" for name, seconds in passed.items()]
                self.clean_at.write_text("\n".join([digest, *lines]))
        self.seconds = {suite: float(seconds) for suite, seconds in passed.items()}
        return ""

    def build(self) -> None:
        env = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
        command = ["cmake", "--build", str(self.build_dir)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode != 0:
            raise SystemExit(f"the build failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")

    def first_failure(self, suites: list[str]) -> str:
        """Return the first failing test with its cause; empty if all pass."""
        env = dict(os.environ, THERMOCLINE_LONG="0")
        for suite in suites:
            limit = max(BUG_LIMIT, SLOWER * self.seconds[suite]) if suite in self.seconds else CLEAN_LIMIT
            try:
                command = [str(self.build_dir / "thermocline_tests"), suite]
                done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                return f"{suite} timed out after {limit:.0f} s"
            if done.returncode != 0:
                lines = done.stdout.splitlines()
                at = next((i for i, line in enumerate(lines) if " FAILED " in line), None)
                if at is None:
                    return f"{suite} ended with {done.returncode}"
                return f"{lines[at].split()[0]}:{lines[at + 1] if at + 1 < len(lines) else ''}"[:150]
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thermocline-mutants-") as temporary:
        copy = Copy(options.folder or Path(temporary))

        def detect(mutant: Mutant) -> str:
            copy.build()
            return copy.first_failure(suites_of(mutant))

        mutants = chosen(MUTANTS, options.names)
        suites = list(dict.fromkeys(suite for mutant in mutants for suite in suites_of(mutant)))
        return plant(mutants, copy.csrc, "tests/faults/mutants.py", lambda: copy.passes_clean(suites), detect)


if __name__ == "__main__":
    sys.exit(main())
