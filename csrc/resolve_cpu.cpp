// resolve, forget and write_words on the CPU. Bitwise equal to ops/reference.py: outputs, tables, order, plans and
// counters.
#include <algorithm>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "hisparse/cpu.h"
#include "hisparse/policy.h"

namespace hisparse::cpu {
namespace {

// One step of one hot region: the wanted positions of a batch row are collected, then placed.
class RegionStep {
 public:
  RegionStep(const ResolveParams& params, int32_t region, int32_t num_slots)
      : num_slots_(num_slots),
        policy_(params.policy),
        slot_of_(params.slot_of + int64_t{region} * params.max_positions),
        position_of_(params.position_of + int64_t{region} * params.max_slots),
        key_(params.key + int64_t{region} * params.max_slots),
        clock_(params.clock + region),
        is_hit_(num_slots_, false) {}

  // Positions come in the order of the flattened selection; repeats are ignored.
  void want(int32_t position, int32_t host_row) {
    const int16_t slot = slot_of_[position];
    if (slot < 0) {
      if (missing_.insert(position).second) misses_.push_back({position, host_row});
    } else if (!is_hit_[slot]) {
      is_hit_[slot] = true;
      ++num_hits_;
    }
  }

  bool empty() const { return num_hits_ == 0 && misses_.empty(); }

  // Advances the clock, touches the hits, loads the misses into victims and plans their reads; returns how many.
  int32_t place(int32_t* plan_host_row, int32_t* plan_slot) {
    ++*clock_;
    const std::vector<int32_t> victims = choose_victims();
    for (int32_t slot = 0; slot < num_slots_; ++slot) {
      if (is_hit_[slot]) touch(slot);
    }
    for (size_t i = 0; i < victims.size(); ++i) {
      load(victims[i], misses_[i].position);
      plan_host_row[i] = misses_[i].host_row;
      plan_slot[i] = victims[i];
    }
    return static_cast<int32_t>(victims.size());
  }

  int64_t num_hits() const { return num_hits_; }
  int64_t num_misses() const { return static_cast<int64_t>(misses_.size()); }

 private:
  struct Miss {
    int32_t position;
    int32_t host_row;
  };

  // Lower goes first. Empty slots hold the lowest key of all.
  int32_t rank(int32_t slot) const {
    if (policy_ == kLru || position_of_[slot] < 0) return key_[slot];
    return -policy::lrfu_age(key_[slot], *clock_);
  }

  // The slots that give way, ascending: the lowest by (rank, slot) among those that this step does not read.
  std::vector<int32_t> choose_victims() const {
    std::vector<int32_t> slots;
    for (int32_t slot = 0; slot < num_slots_; ++slot) {
      if (!is_hit_[slot]) slots.push_back(slot);
    }
    const size_t num_victims = std::min(misses_.size(), slots.size());
    std::stable_sort(slots.begin(), slots.end(), [this](int32_t a, int32_t b) { return rank(a) < rank(b); });
    slots.resize(num_victims);
    std::sort(slots.begin(), slots.end());
    return slots;
  }

  void touch(int32_t slot) {
    key_[slot] = policy_ == kLru ? policy::lru_key(*clock_, true) : policy::lrfu_touch(key_[slot], *clock_);
  }

  void load(int32_t slot, int32_t position) {
    const int32_t evicted = position_of_[slot];
    if (evicted >= 0) slot_of_[evicted] = policy_ == kLru ? int16_t{-1} : policy::ghost_of_key(key_[slot]);
    const int32_t history = policy::key_of_ghost(slot_of_[position]);
    key_[slot] = policy_ == kLru ? policy::lru_key(*clock_, false) : policy::lrfu_touch(history, *clock_);
    slot_of_[position] = static_cast<int16_t>(slot);
    position_of_[slot] = position;
  }

  const int32_t num_slots_;
  const int32_t policy_;
  int16_t* const slot_of_;      // [max_positions]
  int32_t* const position_of_;  // [max_slots]
  int32_t* const key_;          // [max_slots]
  int32_t* const clock_;        // [1]
  std::vector<bool> is_hit_;    // [num_slots]
  int64_t num_hits_ = 0;
  std::vector<Miss> misses_;  // in order of first occurrence
  std::unordered_set<int32_t> missing_;
};

// What a batch row has selected, and its view of the tables.
class Selection {
 public:
  Selection(const ResolveParams& params, int32_t batch_row)
      : params_(params),
        batch_row_(batch_row),
        request_(params.batch[batch_row].request),
        region_(params.batch[batch_row].region),
        num_slots_(params.batch[batch_row].num_slots),
        begin_(int64_t{params.query_start[batch_row]} * params.top_k),
        end_(int64_t{params.query_start[batch_row + 1]} * params.top_k) {}

  void run() {
    const int64_t max_entries = int64_t{params_.max_query_rows} * params_.top_k;
    const bool has_region = end_ - begin_ <= max_entries && region_ >= 0 && num_slots_ > 0;
    for (int64_t i = begin_; i < end_; ++i) resolve_resident(i);
    if (has_region) resolve_hot();
  }

 private:
  bool is_padding(int32_t position) const {
    return position < 0 || position >= int64_t{params_.max_pages} * params_.block_size;
  }

  int32_t resident_block(int32_t part, int32_t page) const {
    return params_.resident[(int64_t{part} * params_.max_requests + request_) * params_.max_pages + page];
  }

  int32_t host_block(int32_t page) const { return params_.host[int64_t{request_} * params_.max_pages + page]; }

  int32_t hot_block(int32_t part, int32_t index) const {
    return params_.hot[(int64_t{part} * params_.num_regions + region_) * params_.max_hot_blocks + index];
  }

  bool is_wanted(int32_t position) const {
    if (is_padding(position)) return false;
    const int32_t page = position / params_.block_size;
    return resident_block(params_.parts[0], page) < 0 && host_block(page) >= 0;
  }

  // Writes the same offset in each part's block.
  template <typename BlockOfPart>
  void write_rows(int64_t entry, int32_t offset, BlockOfPart block_of_part) const {
    const int64_t num_entries = int64_t{params_.num_query_rows} * params_.top_k;
    for (int i = 0; i < params_.num_parts; ++i) {
      const int64_t row = int64_t{block_of_part(params_.parts[i])} * params_.block_stride_rows + offset;
      params_.rows[i * num_entries + entry] = static_cast<int32_t>(row);
    }
  }

  void resolve_resident(int64_t entry) const {
    const int32_t position = params_.topk[entry];
    if (is_padding(position)) return;
    const int32_t page = position / params_.block_size;
    if (resident_block(params_.parts[0], page) >= 0) {
      write_rows(entry, position % params_.block_size, [&](int32_t part) { return resident_block(part, page); });
      ++params_.counters[kResident];
    } else if (host_block(page) < 0) {
      ++params_.counters[kUnreadable];
    }
  }

  void resolve_hot() const {
    RegionStep step(params_, region_, num_slots_);
    for (int64_t i = begin_; i < end_; ++i) {
      const int32_t position = params_.topk[i];
      if (!is_wanted(position)) continue;
      const int64_t host_row =
          int64_t{host_block(position / params_.block_size)} * params_.block_size + position % params_.block_size;
      step.want(position, static_cast<int32_t>(host_row));
    }
    if (step.empty()) return;
    const int64_t plan = int64_t{batch_row_} * params_.plan_capacity;
    const int32_t num_loaded = step.place(params_.plan_host_row + plan, params_.plan_slot + plan);
    params_.plan_count[batch_row_] = num_loaded;
    params_.counters[kHits] += step.num_hits();
    params_.counters[kMisses] += step.num_misses();
    params_.counters[kOverflow] += step.num_misses() - num_loaded;
    for (int64_t i = begin_; i < end_; ++i) write_hot(i);
  }

  void write_hot(int64_t entry) const {
    const int32_t position = params_.topk[entry];
    if (!is_wanted(position)) return;
    const int32_t slot = params_.slot_of[int64_t{region_} * params_.max_positions + position];
    if (slot < 0) return;
    write_rows(entry, slot % params_.block_size,
               [&](int32_t part) { return hot_block(part, slot / params_.block_size); });
  }

  const ResolveParams& params_;
  const int32_t batch_row_;
  const int32_t request_;
  const int32_t region_;
  const int32_t num_slots_;
  const int64_t begin_;  // entries of the flattened selection
  const int64_t end_;
};

void forget_region(const ForgetParams& params, int32_t region, int32_t first_slot, int32_t first_position) {
  int16_t* slot_of = params.slot_of + int64_t{region} * params.max_positions;
  int32_t* position_of = params.position_of + int64_t{region} * params.max_slots;
  int32_t* key = params.key + int64_t{region} * params.max_slots;
  for (int32_t slot = 0; slot < params.max_slots; ++slot) {
    const int32_t position = position_of[slot];
    if (position < 0 || (slot < first_slot && position < first_position)) continue;
    slot_of[position] = -1;
    position_of[slot] = -1;
    key[slot] = policy::kEmptyKey;
  }
  const bool is_reset = first_slot <= 0;
  const int32_t first_ghost = is_reset ? 0 : std::clamp(first_position, 0, params.max_positions);
  std::fill(slot_of + first_ghost, slot_of + params.max_positions, int16_t{-1});
  if (is_reset) params.clock[region] = 0;
}

}  // namespace

void resolve(const ResolveParams& params) {
  const int64_t num_entries = int64_t{params.num_query_rows} * params.top_k;
  std::fill_n(params.rows, params.num_parts * num_entries, -1);
  std::fill_n(params.plan_count, params.num_plan_rows, 0);
  for (int32_t r = 0; r < params.num_batch_rows; ++r) {
    if (params.batch[r].request >= 0) Selection(params, r).run();
  }
  for (int64_t t = 0; t < params.num_query_rows; ++t) {
    const int32_t* rows = params.rows + t * params.top_k;
    params.counts[t] =
        static_cast<int32_t>(std::count_if(rows, rows + params.top_k, [](int32_t row) { return row >= 0; }));
  }
}

void write_words(const WordsParams& params) {
  for (int32_t i = 0; i < params.num_writes; ++i) params.words[params.at[i]] = static_cast<int32_t>(params.value[i]);
}

void forget(const ForgetParams& params) {
  for (int32_t i = 0; i < params.num_forgets; ++i) {
    forget_region(params, params.regions[i], params.first_slot[i], params.first_position[i]);
  }
}

}  // namespace hisparse::cpu
