// Admission: which keys of a training batch get a row.
//
// Batches are planned one after the other, far ahead of training. Every change that planning makes is logged per batch,
// until the batch is trained; the state as of the last trained batch can therefore be saved and restored at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "admission/count_sketch.h"
#include "admission/key_counts.h"
#include "admission/key_states.h"
#include "dram/dedup.h"

namespace thermocline {

enum class AdmissionKind { kExact, kSketch, kProbability };

struct AdmissionRule {
  AdmissionKind kind = AdmissionKind::kExact;
  uint32_t count = 1;         // kExact, kSketch: occurrences at which a key is admitted
  double probability = 1;     // kProbability: of one occurrence
  uint64_t memory = 1 << 20;  // bytes of the counters
  uint64_t seed = 0;
  uint64_t table = 0;
};

// The state as of the last trained batch, without the keys that have a row.
struct AdmissionState {
  uint64_t batches = 0;            // planned so far
  uint64_t dropped = 0;            // counters that were dropped so far
  std::vector<uint64_t> keys;      // kExact: keys that were counted and not admitted, ascending
  std::vector<uint32_t> counts;    // and their counts
  std::vector<uint16_t> cells;     // kSketch
  std::vector<uint64_t> admitted;  // admitted keys that may have no row, ascending
};

struct AdmissionStats {
  uint64_t batches = 0;        // trained
  uint64_t keys_admitted = 0;  // of trained batches
  uint64_t ids_admitted = 0;   // occurrences in trained batches
  uint64_t ids_refused = 0;
  uint64_t counters = 0;  // keys that are counted now
  uint64_t counters_dropped = 0;
  uint64_t counter_bytes = 0;       // memory of the counters
  uint64_t admitted_bytes = 0;      // memory of the set of admitted keys
  uint64_t log_bytes = 0;           // memory of the logs of planned batches
  uint64_t working_bytes = 0;       // memory that the next plan reuses
  uint64_t peak_working_bytes = 0;  // largest working memory of a plan
};

// A key is admitted in the batch in which its count reaches the rule's, with all its occurrences there, and stays
// admitted until `forget`. Exact counters that exceed their memory: those with the smallest counts are dropped, until
// at most half of the memory is in use.
//
// Thread safety: all calls may run concurrently.
class AdmissionFilter {
 public:
  explicit AdmissionFilter(const AdmissionRule& rule);

  // Plans the next batch: refused[i] is 1 if ids[i] is not admitted, else 0. Returns the number of the batch, from 1.
  // Unless null, counted[i] is 0 if ids[i] is no occurrence of its own: another one stands for it. Equal to plan_keys
  // with the unique keys in the order of their first occurrence.
  uint64_t plan(const uint64_t* ids, size_t n, uint8_t* refused, const uint8_t* counted = nullptr);

  // Plans the next batch, given its unique keys with their numbers of occurrences, at least 1 each: all of them, and
  // those that are counted. The order of the keys matters only to a sketch and to counters that exceed their memory.
  // kProbability: counted[i] is the number of occurrences that `draw` has chosen. `refused` is as for `plan`, per key.
  uint64_t plan_keys(const uint64_t* keys, const uint32_t* counted, const uint32_t* all, size_t n, uint8_t* refused);

  // As plan_keys for all occurrences of the keys of a working set, with refused[i] per id. Returns the number of
  // refused ids. Not for kProbability.
  uint64_t plan_working_set(const WorkingSetView& set, uint8_t* refused);

  // Sets drawn[i] to 1 if the occurrence of ids[i] at position first + i of a batch admits its key. kProbability.
  void draw(const uint64_t* ids, size_t n, uint64_t batch, uint64_t first, uint8_t* drawn) const;

  // As of the last trained batch; counts nothing.
  void read(const uint64_t* ids, size_t n, uint8_t* refused) const;

  // All batches up to `batch` are trained. Unless `stored`, the keys that they admitted may have no row.
  void train(uint64_t batch, bool stored);

  // Keys have been trained: they have a row.
  void set_stored(const uint64_t* keys, size_t n);

  // Sets refused[i] to 1 if keys[i] is not admitted by any batch that was planned, else 0; counts nothing.
  void peek(const uint64_t* keys, size_t n, uint8_t* refused) const;

  // Undoes all batches after `batch`, which was planned: they will not be trained.
  void roll_back(uint64_t batch);

  // Keys have a row.
  void admit(const uint64_t* keys, size_t n);

  // Keys have no row any more, and count from 0 (but not in a sketch). No batch may be planned and not trained.
  void forget(const uint64_t* keys, size_t n);

  // Forgets all admitted keys and undoes all batches that were not trained: other rows will follow by `admit`.
  void clear_admitted();

  AdmissionState save() const;
  void load(const AdmissionState& state);

  uint64_t planned() const;

  // Keys that trained batches or `admit` admitted, ascending.
  std::vector<uint64_t> admitted() const;

  AdmissionStats stats() const;

 private:
  struct KeyChange {
    uint64_t key;
    uint32_t before;
  };
  struct CellChange {
    uint64_t cell;
    CountSketch::Cell before;
  };
  // Occurrences of a key in the present batch: all, and those that count or were drawn.
  struct Occurrences {
    uint64_t key = 0;
    uint32_t counted = 0, all = 0;
    bool refused = true;
  };
  struct Log {
    uint64_t batch = 0;
    uint64_t dropped_before = 0;
    uint64_t ids = 0, refused = 0;
    std::vector<KeyChange> keys;
    std::vector<CellChange> cells;
    std::vector<uint64_t> admitted;
    size_t bytes() const;
  };

  template <typename Fn>
  void look_up(const uint64_t* ids, size_t n, Fn&& found) const;
  void find_waiting(const uint64_t* ids, size_t n);
  void group_waiting(const uint64_t* ids, const uint8_t* counted);
  void decide(uint64_t ids);
  void prefetch_block(size_t first) const;
  uint64_t end_plan();
  size_t working_bytes() const;
  bool count(uint64_t key, uint32_t occurrences, Log& log);
  bool count_exactly(uint64_t key, uint32_t occurrences, Log& log);
  bool count_in_sketch(uint64_t key, Log& log);
  void drop_smallest(Log& log);
  bool drawn(uint64_t key, uint64_t batch, uint64_t position) const;
  void undo(const Log& log);
  void roll_back_locked(uint64_t batch);

  const AdmissionRule rule_;
  const uint64_t mix_;
  mutable std::mutex mutex_;  // protects everything below
  std::unique_ptr<KeyCounts> counters_;
  std::unique_ptr<CountSketch> sketch_;
  KeyStates admitted_;  // 1 if the batch that admitted the key is trained, else 2
  KeyStates rowless_;   // admitted keys that may have no row
  uint64_t planned_ = 0, trained_ = 0;
  uint64_t dropped_ = 0;
  std::deque<Log> logs_;  // of the batches trained_ + 1 .. planned_
  AdmissionStats totals_;
  // Working memory of a plan: 4 bytes per key or id of the batch, 24 per key that is not admitted yet; by ids also 12
  // to 20 per id that is not admitted yet. At most max(1 MiB, memory / 8) is kept for the next plan.
  uint64_t peak_working_bytes_ = 0;
  std::vector<uint32_t> waiting_;         // positions of the batch whose keys are not admitted
  std::vector<Occurrences> occurrences_;  // of their unique keys
  std::vector<uint32_t> numbers_;         // [waiting_.size()] into occurrences_
  std::vector<uint32_t> table_;           // hash table: into occurrences_
};

}  // namespace thermocline
