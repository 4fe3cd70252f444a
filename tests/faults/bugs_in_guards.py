"""Planted bugs in guards: of ranks that differ or are slow, of damaged stores, of hostile files and messages."""

from __future__ import annotations

from planted_bugs import CppMutant, PythonMutant

_SUMS = "tests/distributed/test_dense_sync.py"
_SHM = "tests/distributed/test_shm_transport.py"
_TOPOLOGY = "tests/distributed/test_topology.py"
_HEARTBEAT = "tests/distributed/test_heartbeat.py"
_MESSAGES = "tests/distributed/test_messages.py"
_STATES = "tests/distributed/test_dense_state.py::test_saving_evaluating_and_resuming_change_no_bit"
_STORE_FILES = "tests/distributed/test_store_files.py"
_RUNS = "tests/checkpoint/test_untrusted_runs.py"
_FILES = "tests/utils/test_atomic_file.py"
_TRAINING = "tests/training/test_damage.py"

STORE = [
    CppMutant(
        "a refused ring leaves one read in flight",
        "util/posix_fs.cc",
        "    if (threads > 0) pool_ = std::move(pool);  // else the callers read\n    uring_ = false;\n",
        "    if (false) pool_ = std::move(pool);\n",
        "StoreEngine.",
    ),
    CppMutant(
        "a refused ring is not reported",
        "util/posix_fs.cc",
        '    warnings_.add(std::string("io_uring: the kernel refused another ring") +',
        '    (void)(std::string("io_uring: the kernel refused another ring") +',
        "StoreEngine.",
    ),
    CppMutant(
        "put fails before the filter is given up",
        "ssd/merger.cc",
        "  if (room.is_short() && room.filter_bytes > 0) {",
        "  if (false && room.filter_bytes > 0) {",
        "StoreBudget.",
    ),
    CppMutant(
        "keys that are expected are not compared with the budget",
        "ssd/merger.cc",
        "  if (fences + log + buffers <= options_.mem_budget) return;",
        "  if (fences + log + buffers > 0) return;",
        "StoreBudget.",
    ),
    CppMutant(
        "puts wait for the syncs of a commit",
        "ssd/store.cc",
        "  {\n    const auto write = begin_write();  // not held below: puts go on during the syncs\n",
        "  const auto write = begin_write();\n  {\n",
        "Store.NothingWaits",
    ),
    CppMutant(
        "the files of a commit are synced one after the other",
        "ssd/store.cc",
        "    ThreadPool syncs(static_cast<int>(std::min<size_t>(ctx.fs->sync_concurrency(), unsynced.size())));\n",
        "    ThreadPool syncs(1);\n",
        "Store.NothingWaits",
    ),
    CppMutant(
        "the log of a set-aside partition is never copied",
        "ssd/merger.cc",
        "bool Merger::set_aside_log_is_due() const {\n  if (!has_damage_) return false;\n",
        "bool Merger::set_aside_log_is_due() const {\n  if (copied_bytes_ < UINT64_MAX) return false;\n",
        "StoreDamage.",
    ),
    CppMutant(
        "put goes on above the bound of a set-aside log",
        "ssd/merger.cc",
        "  if (copied_bytes_ <= bound) return;\n",
        "  if (copied_bytes_ <= bound || bound > 0) return;\n",
        "StoreDamage.",
    ),
    CppMutant(
        "a damaged old manifest is not reported",
        "ssd/catalog.cc",
        '  ctx_.warnings.add(\n      ctx_.path +\n      ": no file of this store',
        '  (void)(\n      ctx_.path +\n      ": no file of this store',
        "StoreRepair.DamagedOldManifest",
    ),
    CppMutant(
        "the number of extents does not grow with the budget",
        "ssd/files.cc",
        "std::max(std::min<size_t>(budget_pages / 16, 4096), budget_pages / 64)",
        "std::min<size_t>(budget_pages / 16, 4096)",
        "Store.ALargerBudget",
    ),
    CppMutant(
        "the keys of the log are read one after the other at opening",
        "ssd/store.cc",
        "rows(std::clamp<size_t>(fit, 1, static_cast<size_t>(threads.size())));",
        "rows(std::clamp<size_t>(fit, 1, 1));",
        "Store.OpeningReads",
    ),
]
RANKS = [
    PythonMutant(
        "sums are not exact by default",
        "config/dense_sync.py",
        "    exact: bool = True\n",
        "    exact: bool = False\n",
        f"{_SUMS}::test_sums_are_exact_by_default_on_three_nodes",
    ),
    PythonMutant(
        "the order of sums depends on the transport",
        "distributed/hierarchical_allreduce.py",
        '        return self.exact or (group == "node" and not self._comm.gpu)\n',
        "        return self.exact or self._comm.uses_shm(group)\n",
        f"{_SUMS}::test_sums_do_not_depend_on_the_transport",
    ),
    PythonMutant(
        "shared memory disappears without a warning",
        "distributed/shm_transport.py",
        "    if index == 0:\n        warnings.warn(",
        "    if index < 0:\n        warnings.warn(",
        f"{_SUMS}::test_sums_do_not_depend_on_the_transport",
    ),
    PythonMutant(
        "every rank decides on the topology",
        "distributed/rendezvous.py",
        '            return json.loads(_await(store, f"{name}/decision", 0, world, timeout))\n',
        '            _await(store, f"{name}/decision", 0, world, timeout)\n'
        "            return decide([value] * world)\n",
        _TOPOLOGY,
    ),
    PythonMutant(
        "NCCL is chosen although a rank has no GPU",
        "distributed/launch.py",
        '{"gpu": all(own_gpu)}',
        '{"gpu": any(own_gpu)}',
        _TOPOLOGY,
    ),
    PythonMutant(
        "a busy rank sends no heartbeat",
        "distributed/heartbeat.py",
        "                count = self._store.add(_COUNTER, int(busy))\n",
        "                count = self._store.add(_COUNTER, 0)\n",
        _HEARTBEAT,
    ),
    PythonMutant(
        "a rank that waits in a collective sends heartbeats",
        "distributed/heartbeat.py",
        "            thread not in self._waiting and now - start < self.busy_timeout",
        "            now - start < self.busy_timeout",
        _HEARTBEAT,
    ),
    PythonMutant(
        "a section that never ends sends heartbeats for ever",
        "distributed/heartbeat.py",
        "            thread not in self._waiting and now - start < self.busy_timeout",
        "            thread not in self._waiting and now >= start",
        _HEARTBEAT,
    ),
    PythonMutant(
        "a broadcast is a gather of all ranks",
        "distributed/communicator.py",
        '            return messages.broadcast_message(self.group("world"), message)\n',
        '            sent = b"" if message is None else message\n'
        '            return messages.all_gather_message(self.group("world"), sent)[0]\n',
        f"{_MESSAGES}::test_broadcast_sends_the_value_once_to_every_rank",
    ),
    PythonMutant(
        "a rank keeps the descriptors of other ranks",
        "distributed/shm_transport.py",
        "        self.memory: Bytes = tensor.numpy()\n",
        "        self.memory: Bytes = tensor.numpy()\n        self.kept = os.open(path, os.O_RDWR)\n",
        f"{_SHM}::test_descriptors_do_not_depend_on_the_number_of_ranks",
    ),
    PythonMutant(
        "too few open files are not refused at start",
        "distributed/group_setup.py",
        "    if hard is not None:\n        problem = (",
        "    if hard == 0:\n        problem = (",
        f"{_SHM}::test_too_few_open_files_are_refused_with_the_number_needed",
    ),
    PythonMutant(
        "files of a store are not counted at start",
        "distributed/store_files.py",
        "        needed = others + max(of_store, files)\n",
        "        needed = others\n",
        _STORE_FILES,
    ),
    PythonMutant(
        "rows of the log are counted as base files",
        "distributed/store_files.py",
        "    least = min(base_files(size), base_files(least_base) + least_log)\n",
        "    least = base_files(size)\n",
        _STORE_FILES,
    ),
    PythonMutant(
        "a limit below the largest number of files is not reported",
        "distributed/store_files.py",
        "    if caution is not None and topology.rank == 0:\n",
        "    if caution is not None and topology.rank < 0:\n",
        _STORE_FILES,
    ),
    PythonMutant(
        "the limit of torchrun is not raised",
        "distributed/group_setup.py",
        "    resource.prlimit(process, resource.RLIMIT_NOFILE, (needed if enough else hard, hard))\n",
        "",
        "tests/distributed/test_rendezvous.py::test_rank_0_raises_the_limit_of_torchrun",
    ),
    PythonMutant(
        "two hops accept machines with different numbers of ranks",
        "distributed/row_exchange.py",
        '        if hops == "two" and not topology.is_uniform:\n',
        '        if hops == "three" and not topology.is_uniform:\n',
        f"{_TOPOLOGY}::test_unequal_machines_are_refused_on_every_rank_by_two_hops_only",
    ),
    PythonMutant(
        "the parts of a manifest are sent to all ranks",
        "checkpoint/manager.py",
        '            written = collective.gather_to_rank0("writing the state of the ranks", write)\n',
        '            written = collective.gather("writing the state of the ranks", write)\n',
        f"{_MESSAGES}::test_save_sends_the_manifest_once",
    ),
    PythonMutant(
        "resharding reads the stores of all ranks",
        "checkpoint/table_stores.py",
        "        return [saved[rank] for rank in overlapping_ranks(self._rank, self._world, len(saved))]\n",
        "        return saved\n",
        "tests/distributed/test_eval_ranks.py::test_resharding_reads_only_stores_with_own_rows",
    ),
    PythonMutant(
        "input files of ranks are not compared",
        "training/run.py",
        "            self._require_equal(self._identities, ",
        "            self._require_equal({}, ",
        "tests/distributed/test_rank_agreement.py::test_configs_and_data_of_a_run",
    ),
    PythonMutant(
        "a save merges the dense models",
        "checkpoint/rank_states.py",
        "        tensors: state_tree.Tensors = {}\n        state = state_tree.pack(self._own_state()",
        "        tensors: state_tree.Tensors = {}\n        _ = self._dense_sync and self._dense_sync.merge_now()\n"
        "        state = state_tree.pack(self._own_state()",
        _STATES,
    ),
    PythonMutant(
        "evaluation leaves the mean model on the ranks",
        "distributed/model_mean.py",
        "            tensor.data = data\n",
        "            pass\n",
        _STATES,
    ),
    PythonMutant(
        "rows of the open batch are exchanged early",
        "distributed/early_rows.py",
        "            chosen = torch.from_numpy(~_among(slots, np.concatenate(opened)))\n",
        "            chosen = torch.ones(len(slots), dtype=torch.bool)\n",
        "tests/distributed/test_early_rows.py",
    ),
    PythonMutant(
        "the NUMA node of the GPU is not used",
        "distributed/launch.py",
        "    if gpu_node in nodes:\n        return gpu_node\n",
        "",
        _TOPOLOGY,
    ),
    PythonMutant(
        "pickled bytes of another rank are loaded",
        "distributed/messages.py",
        '    decoder = _Decoder(memoryview(data).cast("B"))\n',
        "    if bytes(data[:1]) == bytes([128]):\n        return __import__('pickle').loads(data)\n"
        '    decoder = _Decoder(memoryview(data).cast("B"))\n',
        _MESSAGES,
    ),
]
FILES = [
    PythonMutant(
        "the default of ssd_mem is 256 MB on any machine",
        "tiers/ssd.py",
        "    return max(_LEAST_MEM_BUDGET, min(max(memory // 8 // ranks, need), memory // 2 // ranks))\n",
        "    return _LEAST_MEM_BUDGET\n",
        "tests/tiers/test_ssd_errors.py::test_default_memory_is_sized_from_machine_store_and_ranks",
    ),
    PythonMutant(
        "a manifest may name a path outside of the run",
        "utils/untrusted_files.py",
        'and "/" not in name and',
        "and",
        f"{_RUNS}::test_names_with_a_path_are_refused",
    ),
    PythonMutant(
        "a symlink may lead out of the run",
        "utils/untrusted_files.py",
        "or not path.resolve().is_relative_to(folder.resolve())",
        "",
        f"{_RUNS}::test_symlinks_that_leave_the_folder_are_refused",
    ),
    PythonMutant(
        "a compressed state may have any size",
        "utils/untrusted_files.py",
        "        content = stream.decompress(data, size + 1)\n",
        "        content = stream.decompress(data)\n",
        "tests/training/test_metrics.py::test_compressed_states_are_bounded",
    ),
    PythonMutant(
        "a temporary file may be a symlink that another user planted",
        "utils/atomic_file.py",
        "os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CREAT | os.O_CLOEXEC",
        f"{_FILES}::test_temporary_file_is_new_and_its_name_unpredictable",
    ),
    PythonMutant(
        "names of temporary files are predictable",
        "utils/atomic_file.py",
        "{secrets.token_hex(8)}",
        "{os.getpid():016x}",
        f"{_FILES}::test_temporary_file_is_new_and_its_name_unpredictable",
    ),
    PythonMutant(
        "remote data of a foreign run is contacted without consent",
        "training/run.py",
        "        recorded = () if allow_remote_data else recorded\n",
        "        recorded = ()\n",
        "tests/cli/test_remote_consent.py",
    ),
    PythonMutant(
        "training goes on in a damaged store",
        "training/trainer.py",
        'if table.spec.on_damage == "stop" and table.damage), "")',
        'if table.spec.on_damage == "never" and table.damage), "")',
        f"{_TRAINING}::test_training_stops_and_names_file_page_and_command",
    ),
    PythonMutant(
        "an own loop goes on in a damaged store",
        "embedding/open_table.py",
        '        if self.spec.on_damage == "stop" and (damage := self.damage):\n',
        '        if self.spec.on_damage == "never" and (damage := self.damage):\n',
        f"{_TRAINING}::test_own_loops_stop_at_a_batch_or_a_commit",
    ),
    PythonMutant(
        "metrics do not show damage",
        "training/rank_figures.py",
        "sum(map(_damaged_partitions, self._tables)) if damaged else 0\n",
        "0\n",
        f"{_TRAINING}::test_going_on_is_exact_and_damage_is_shown",
    ),
    PythonMutant(
        "damage of one rank stops that rank only",
        "training/trainer.py",
        "        return self.ranks.requested(DAMAGE, bool(self._damage()))\n",
        "        return bool(self._damage())\n",
        "tests/distributed/test_restarts.py::test_damage_of_one_rank_stops_all_at_the_same_step",
    ),
]
GUARDS = [*RANKS, *FILES]
