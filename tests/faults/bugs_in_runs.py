"""Planted bugs in checkpoints, publishing, admission, the look-ahead and ranks, for mutants_python.py."""

from __future__ import annotations

from planted_bugs import PythonMutant

_MANAGER = "tests/checkpoint/test_manager.py"
_RESUMED = f"{_MANAGER}::test_resumed_run_equals_uninterrupted_run"
_RESTORED = f"{_MANAGER}::test_restore_in_one_process_to_any_kept_step_or_tag"
_RETAINED = f"{_MANAGER}::test_only_the_last_saves_and_the_tags_are_kept"
_DAMAGE = "tests/checkpoint/test_damage.py"
_PUBLICATION = "tests/serving/test_publication.py"
_PUBLISHER = "tests/training/test_publisher.py"
_EXPORT = "tests/serving/test_export.py"
_ADMISSION = "tests/embedding/test_admission.py"
_ADMITTED = "tests/exact/test_admission_exact.py"
_DELETED = f"{_ADMITTED}::test_keys_count_from_0_after_their_rows_were_deleted_whatever_was_planned"
_LOOKAHEAD = "tests/pipeline/test_lookahead.py"
_EXCHANGE = "tests/distributed/test_row_exchange.py"
_OVERLAP = "tests/distributed/test_eval_ranks.py::test_overlapping_ranks_are_those_that_own_common_keys"
_AGREEMENT = "tests/distributed/test_rank_agreement.py"
_BETWEEN_NODES = "tests/distributed/test_periodic_averaging.py::test_averaging_between_nodes_equals_the_simulation"
_STATES = "tests/distributed/test_dense_state.py"

CHECKPOINTS = [
    PythonMutant(
        "commits that a kept checkpoint names are released",
        "checkpoint/table_stores.py",
        "                if epoch not in named:\n",
        "                if epoch != max(named, default=0):\n",
        _RESTORED,
    ),
    PythonMutant(
        "the last save of a tag is removed",
        "checkpoint/manager.py",
        "kept = {*saves[-self._keep :], *last_of_tag.values()}",
        "kept = {*saves[-self._keep :]}",
        _RETAINED,
    ),
    PythonMutant(
        "state files of kept checkpoints are removed",
        "checkpoint/manager.py",
        'files = {name for manifest in self._manifests.values() for name in manifest["files"]}',
        'files = {name for manifest in list(self._manifests.values())[-1:] for name in manifest["files"]}',
        _RESTORED,
    ),
    PythonMutant(
        "the state of random generators is not restored",
        "checkpoint/rank_states.py",
        "            state_tree.set_random_state(state.random)\n",
        "            pass\n",
        _RESUMED,
    ),
    PythonMutant(
        "the checksum of a state file is not compared",
        "checkpoint/rank_states.py",
        'or sha256_hex(data) != expected["sha256"]',
        "",
        _DAMAGE,
    ),
    PythonMutant(
        "a resumed table counts its steps from 0",
        "checkpoint/table_stores.py",
        '"step_count": table.step_count,',
        '"step_count": 0,',
        _RESUMED,
    ),
    PythonMutant(
        "a save does not write rows that changed in DRAM",
        "checkpoint/table_stores.py",
        "        table.backend.flush(store)\n",
        "",
        _RESUMED,
    ),
    PythonMutant(
        "manifests of removed checkpoints stay",
        "checkpoint/manager.py",
        '        self._collective.broadcast("removing old checkpoints", self._sweep_manifests)\n',
        "",
        _RETAINED,
    ),
]
PUBLISHING = [
    PythonMutant(
        "deleted keys stay published",
        "serving/publication.py",
        "                    writer.erase(deleted[np.argsort(hash_keys(deleted))])\n",
        "",
        _PUBLICATION,
    ),
    PythonMutant(
        "a comparison misses rows with other weights",
        "serving/changes.py",
        "changed = ~known | (old_rows[at] != encode(rows, self._precision)).any(axis=1)",
        "changed = ~known",
        _EXPORT,
    ),
    PythonMutant(
        "a resumed run publishes a delta to a later version",
        "training/publisher.py",
        "            and version.step <= step\n",
        "",
        _PUBLISHER,
    ),
    PythonMutant(
        "versions that the current one needs are deleted",
        "serving/publication.py",
        "            oldest = min(oldest, current.number)\n",
        "",
        _PUBLICATION,
    ),
    PythonMutant(
        "a delta may follow a version that was rolled back to",
        "serving/publication.py",
        "        if self._read_pointer().rolled_back:\n",
        "        if False:\n",
        _PUBLICATION,
    ),
    PythonMutant(
        "a version that never became current stays",
        "serving/publication.py",
        "[number for number in folders if number > current.number]:\n",
        "[number for number in folders if number > current.number + 1]:\n",
        _PUBLICATION,
    ),
    PythonMutant(
        "a reader skips a delta",
        "serving/snapshot.py",
        "        chain.append((version, folder))\n",
        "        if len(chain) != 1 or version.previous is None:\n            chain.append((version, folder))\n",
        _PUBLICATION,
    ),
    PythonMutant(
        "the version becomes current before it is complete",
        "serving/publication.py",
        "            (temporary / MANIFEST).write_bytes(version.to_json())\n",
        "            self._set_current(Current(publication, version.number, rolled_back=False))\n"
        "            (temporary / MANIFEST).write_bytes(version.to_json())\n",
        _PUBLICATION,
    ),
]
ADMISSION = [
    PythonMutant(
        "counters are not saved",
        "checkpoint/rank_states.py",
        "        if tables := {name: own for name, table",
        "        if False and {name: own for name, table",
        _ADMISSION,
    ),
    PythonMutant(
        "a field that two bags read counts twice",
        "embedding/admission_split.py",
        "            first.append(field not in seen)\n",
        "            first.append(True)\n",
        _ADMITTED,
    ),
    PythonMutant(
        "ids that are not admitted are lost in the look-ahead",
        "embedding/admission_plan.py",
        "        whole[refused] = lost\n",
        "        whole[refused] = 0\n",
        _ADMISSION,
    ),
    PythonMutant(
        "deleted keys keep their count",
        "embedding/admission_backend.py",
        "            self._filter.forget(keys)\n",
        "",
        _DELETED,
    ),
    PythonMutant(
        "batches that were planned before a deletion keep their decision",
        "embedding/admission_backend.py",
        "        if not _same(refused, decision.refused):\n",
        "        if False:\n",
        _DELETED,
    ),
]
LOOK_AHEAD = [
    PythonMutant(
        "a batch in flight shares its object with the loader",
        "pipeline/lookahead.py",
        "        self.batch = copy.copy(batch)",
        "        self.batch = batch",
        _LOOKAHEAD,
    ),
    PythonMutant(
        "a batch passes before its rows are loaded",
        "pipeline/lookahead.py",
        "        return max((ahead.to_visit for ahead in (*self._ahead.values(), *self._frozen)), default=0.0)\n",
        "        return 0.0\n",
        _LOOKAHEAD,
    ),
    PythonMutant(
        "ids of frozen bags stay counted after their batch",
        "pipeline/lookahead.py",
        "            self._frozen.pop().release()\n",
        "            self._frozen.pop()\n",
        _LOOKAHEAD,
    ),
    PythonMutant(
        "the memory of batches ahead is not counted",
        "pipeline/lookahead.py",
        '        self.bytes = sum(int(getattr(array, "nbytes", 0)) for array in arrays)\n',
        "        self.bytes = 0 * len(arrays)\n",
        _LOOKAHEAD,
    ),
    PythonMutant(
        "a pull that does not fit keeps the look-ahead's rows",
        "pipeline/prefetch.py",
        "                if before == 0 and any(table.drop_lookahead() for table in self._tables):\n",
        "                if False:\n",
        _LOOKAHEAD,
    ),
]
RANKS = [
    PythonMutant(
        "a sum over ranks keeps only the last gradient",
        "distributed/row_reduce.py",
        "self.values + other.values, other.values)",
        "other.values, other.values)",
        _EXCHANGE,
    ),
    PythonMutant(
        "keys at the end of a rank's range are not resharded",
        "distributed/key_sharding.py",
        "(last * saved_world >> 16) + 1)",
        "max(last * saved_world >> 16, (first * saved_world >> 16) + 1))",
        _OVERLAP,
    ),
    PythonMutant(
        "ranks with other settings train on",
        "distributed/rank_agreement.py",
        "    if (gathered == gathered[0]).all():\n",
        "    if gathered is not None:\n",
        _AGREEMENT,
    ),
    PythonMutant(
        "every rank restores rank 0's dense state",
        "checkpoint/rank_states.py",
        "            own = self._read(manifest, self._rank) if same_ranks else {}\n",
        "            own = self._read(manifest, 0) if same_ranks else {}\n",
        _STATES,
    ),
    PythonMutant(
        "the mean over a node is its sum",
        "distributed/hierarchical_allreduce.py",
        "            buffer *= 1 / len(node)\n",
        "",
        _BETWEEN_NODES,
    ),
]
BUGS = [*CHECKPOINTS, *PUBLISHING, *ADMISSION, *LOOK_AHEAD, *RANKS]
