"""Planted bugs in C++: deletions beside puts, scans that follow their range, the kept log, rows erased in DRAM."""

from __future__ import annotations

from planted_bugs import CppMutant

_RANDOM = "StoreFollow.ScanAndChanges"
_REPLAY = "StoreChanges.Replay"

CHANGES = [
    CppMutant(
        "deletions that wait for a put are lost",
        "ssd/store_write.cc",
        "        for (uint64_t key : deletions_.keys()) buffer_.set(key, nullptr);\n",
        "",
        _RANDOM,
    ),
    CppMutant(
        "a scan does not follow deletions",
        "ssd/store_write.cc",
        "      follow(keys, n, nullptr);\n",
        "",
        _RANDOM,
    ),
    CppMutant(
        "a scan does not follow large puts",
        "ssd/store_write.cc",
        "    follow(items, keys, rows);\n",
        "",
        _RANDOM,
    ),
    CppMutant(
        "a scan does not follow loads",
        "ssd/store_write.cc",
        "  follow(items, keys, &rows);\n",
        "",
        "StoreFollow.LoadedRows",
    ),
    CppMutant(
        "a scan of a range has rows whose deletion waits for a put",
        "ssd/store_scan.cc",
        "    if (range.contains(key)) out.buffered[key] = nullptr;\n",
        "    (void)key;\n",
        _RANDOM,
    ),
    CppMutant(
        "a put that ends after the deletion of its row is a change",
        "ssd/store_follow.cc",
        "  if (row && deletions_.find(key) >= 0) return;",
        "  if (row && deletions_.find(key) >= 0 && followed.lost) return;",
        "StoreFollow.ADeletionDuring",
    ),
    CppMutant(
        "changes are given although a part of the log is gone",
        "ssd/store_changes.cc",
        "  if (found.size() != needed) {\n",
        "  if (found.empty()) {\n",
        _REPLAY,
    ),
    CppMutant(
        "changes since a position of an abandoned history are given",
        "ssd/store_changes.cc",
        "       (found.front()->segment->nonce != since.nonce || found.front()->first_page != since.first_page))) {\n",
        "       found.front()->segment->nonce == 0)) {\n",
        _REPLAY,
    ),
    CppMutant(
        "rows that were loaded without the log are not missed",
        "ssd/store_write.cc",
        "  index_.start_at(log_.skip_extent());\n",
        "",
        "StoreChanges.LoadedRows",
    ),
    CppMutant(
        "a reader keeps the log and deletes files of the writer",
        "ssd/store_changes.cc",
        "  if (options_.read_only) return;",
        "  if (options_.read_only && index_.keeps_log()) return;",
        "StoreChanges.AReader",
    ),
    CppMutant(
        "a full disk keeps the log",
        "ssd/store_write.cc",
        "      index_.forget_log();\n",
        "",
        "StoreChanges.AFullDisk",
    ),
    CppMutant(
        "the kept log has no bound",
        "ssd/index.cc",
        "  if (kept_bytes_ > kept_limit_ && kept_bytes_ > base_bytes()) forget_log();\n",
        "",
        "StoreChanges.AKeptLog",
    ),
    CppMutant(
        "the kept log is not given up for memory",
        "ssd/merger.cc",
        "  if (room.is_short()) {  // the kept log",
        "  if (false) {  // the kept log",
        "StoreChanges.LittleMemory",
    ),
    CppMutant(
        "a pull that has read a row uses it after its deletion",
        "dram/pull.cc",
        "    initial_.store(m.key, row(loads.slots[j]));  // erased",
        "    // erased",
        "DramErase.",
    ),
    CppMutant(
        "deleted rows stay dirty",
        "dram/row_access.cc",
        "    ++erased;\n    clear_dirty(slot);\n",
        "    ++erased;\n",
        "DramErase.",
    ),
    CppMutant(
        "a deletion does not wait for writes of its rows",
        "dram/row_access.cc",
        "      if (!writing(slot)) return;\n",
        "      if (slot != kNoSlot) return;\n",
        "DramErase.",
    ),
    CppMutant(
        "rows that are being evicted are in neither tier",
        "dram/writeback.cc",
        "    if (is_dirty(slot)) {\n      set_written(slot);\n",
        "    if (is_dirty(slot)) {\n",
        "DramErase.",
    ),
    CppMutant(
        "rows that are written ahead are in neither tier",
        "dram/write_ahead.cc",
        "    set_written(slot);\n",
        "",
        "DramErase.",
    ),
    CppMutant(
        "a slot is reused while its row is copied without a mutex",
        "dram/row_access.cc",
        "  std::lock_guard no_copies(erase_mutex_);\n",
        "",
        "DramTierStress.ReadsOfErased",
    ),
    CppMutant(
        "copies without a mutex compare tags only",
        "dram/row_access.cc",
        "!meta()[slots[j]].holds(keys[begin + j])",
        "meta()[slots[j]].load_state() != SlotState::kReady",
        "DramTier.KeysWithEqualTags",
    ),
    CppMutant(
        "a row that is not found without a mutex is missing",
        "dram/row_access.cc",
        "      visit(shard_of(j), begin + j, shard_of(j).find(tag_of(j), keys[begin + j]));\n",
        "      visit(shard_of(j), begin + j, kNoSlot);\n",
        "DramTier.KeysWithEqualTags",
    ),
    CppMutant(
        "a deletion waits until no read is in progress",
        "dram/tier.h",
        "  FairMutex erase_mutex_;",
        "  std::shared_mutex erase_mutex_;",
        "DramTierStress.EraseEnds",
    ),
]
