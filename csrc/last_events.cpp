// insert_events, last_events: the latest events of each node, linked in a log (the meaning is in
// pyg_scale/ops/last_events.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

// A row of the log: the other end of an event, its number, and the entry before it of the same
// node. Entries are counted from 1, so that memory full of zeros says that nothing has happened.
struct Entry {
  int64_t neighbor, event, previous;
};
constexpr int64_t kColumns = sizeof(Entry) / sizeof(int64_t);

// A thread keeps no more than this between calls.
constexpr size_t kKeptBytes = size_t{1} << 24;
constexpr int64_t kAhead = 8;  // rows; covers the latency of memory
constexpr int64_t kBlockEntries = 4096;

int64_t* writable(Tensor& tensor, int64_t size, const char* name) {
  int64_data(tensor, size, name);
  return tensor.mutable_data_ptr<int64_t>();
}

int64_t num_entries(const Tensor& log) {
  check(log.is_cpu() && log.dim() == 1 && log.numel() % kColumns == 0,
        "log must be 1-D, on the CPU, with 3 numbers for each entry");
  return log.numel() / kColumns;
}

// Appends two entries for each event, one for each end, behind the `used` entries of the log.
void insert_events(Tensor head, Tensor log, Tensor src, Tensor dst, int64_t used,
                   int64_t first_event) {
  const int64_t num_nodes = head.numel(), n = src.numel(), capacity = num_entries(log);
  check_apart(head, "head", {&log, &src, &dst});
  check_apart(log, "log", {&src, &dst});
  int64_t* first = writable(head, num_nodes, "head");
  auto* entry = reinterpret_cast<Entry*>(writable(log, log.numel(), "log"));
  const int64_t* from = int64_data(src, n, "src");
  const int64_t* to = int64_data(dst, n, "dst");
  check_each_within(from, n, "node", num_nodes);
  check_each_within(to, n, "node", num_nodes);
  check(used >= 0 && used <= capacity && n <= (capacity - used) / 2,
        "the log has no room for two entries of each event");
  check_count(first_event, "first_event");
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(first + from[i + kAhead], 1);
      __builtin_prefetch(first + to[i + kAhead], 1);
    }
    for (const auto& [node, neighbor] : {std::pair{to[i], from[i]}, std::pair{from[i], to[i]}}) {
      entry[used] = {neighbor, first_event + i, first[node]};
      first[node] = ++used;
    }
  }
}

// The entry before another one, of the same node, or the last one of a node.
int64_t checked_entry(int64_t found, int64_t limit) {
  if (found < 0 || found > limit) [[unlikely]] {
    fail("the log is damaged: entry " + std::to_string(found) + " is not before entry " +
         std::to_string(limit + 1));
  }
  return found;
}

// Numbers ids in ascending order: by a bit for every node, or sorted, where there are few ids.
class Ranks {
 public:
  // `most`: how many ids there will be.
  void begin(int64_t num_nodes, int64_t most) {
    const int64_t words = num_nodes / 64 + 1;
    by_bits_ = words <= kWordsPerId * most;
    sorted_.clear();
    if (!by_bits_) return;
    bits_.reserve(words);
    bits_.set_size(words);
    std::memset(bits_.data(), 0, static_cast<size_t>(words) * sizeof(uint64_t));
  }

  void add(const int64_t* ids, int64_t count) {
    if (!by_bits_) return sorted_.append(ids, count);
    for (int64_t i = 0; i < count; ++i) bits_[ids[i] / 64] |= uint64_t{1} << (ids[i] % 64);
  }

  // All ids, once each, ascending.
  const Buffer<int64_t>& finish() {
    if (!by_bits_) {
      std::sort(sorted_.data(), sorted_.data() + sorted_.size());
      sorted_.set_size(std::unique(sorted_.data(), sorted_.data() + sorted_.size()) -
                       sorted_.data());
      return sorted_;
    }
    before_.clear();
    before_.reserve(bits_.size());
    for (int64_t word = 0; word < bits_.size(); ++word) {
      before_.push(sorted_.size());
      for (uint64_t left = bits_[word]; left; left &= left - 1) {
        sorted_.push(64 * word + std::countr_zero(left));
      }
    }
    return sorted_;
  }

  // The place of one of them.
  int64_t of(int64_t id) const {
    if (!by_bits_) {
      return std::lower_bound(sorted_.data(), sorted_.data() + sorted_.size(), id) - sorted_.data();
    }
    const uint64_t below = bits_[id / 64] & ((uint64_t{1} << (id % 64)) - 1);
    return before_[id / 64] + std::popcount(below);
  }

  size_t bytes() const { return sorted_.bytes() + bits_.bytes() + before_.bytes(); }

 private:
  static constexpr int64_t kWordsPerId = 32;  // where clearing them costs less than sorting ids

  bool by_bits_ = false;
  Buffer<int64_t> sorted_, before_;
  Buffer<uint64_t> bits_;
};

// What a thread keeps between calls.
struct Scratch {
  Buffer<int64_t> at;     // the entry of each node that is read next
  Buffer<int64_t> count;  // entries of each node
  Buffer<Entry> block;    // those of some nodes
  Buffer<int64_t> neighbor, event;
  Ranks ranks;

  size_t bytes() const {
    return at.bytes() + count.bytes() + block.bytes() + neighbor.bytes() + event.bytes() +
           ranks.bytes();
  }
};

// Reads the last `size` entries of nodes, node after node, the latest first.
void read_entries(const Entry* entry, int64_t capacity, int64_t n, int64_t size, Scratch& kept) {
  kept.neighbor.clear();
  kept.event.clear();
  kept.count.reserve(n);
  const int64_t most = std::min(size, capacity);
  // Entries of a node are read one after the other, those of several nodes at the same time.
  const int64_t step = std::clamp<int64_t>(kBlockEntries / std::max<int64_t>(most, 1), 1, 64);
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t rows = std::min(step, n - begin);
    int64_t *at = kept.at.data() + begin, *count = kept.count.data() + begin;
    std::fill_n(count, rows, 0);
    int64_t longest = 0;
    for (int64_t k = 0, going = rows; k < most && going; ++k) {
      going = 0;
      kept.block.reserve((k + 1) * rows);
      kept.block.set_size((k + 1) * rows);
      Entry* column = kept.block.data() + k * rows;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t here = at[i];
        if (!here) continue;
        column[i] = entry[here - 1];
        at[i] = checked_entry(column[i].previous, here - 1);
        if (at[i]) __builtin_prefetch(entry + at[i] - 1);
        count[i] = k + 1;
        ++going;
      }
      longest = k + 1;
    }
    kept.neighbor.reserve(kept.neighbor.size() + rows * longest);
    kept.event.reserve(kept.event.size() + rows * longest);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < count[i]; ++k) {
        kept.neighbor.push(kept.block[k * rows + i].neighbor);
        kept.event.push(kept.block[k * rows + i].event);
      }
    }
  }
}

// The last `size` events of nodes, the latest first, and the nodes themselves and their neighbours
// in ascending order, by whose places edges are named.
std::tuple<Tensor, Tensor, Tensor> last_events(Tensor head, Tensor log, Tensor n_id, int64_t size) {
  const int64_t num_nodes = head.numel(), n = n_id.numel(), capacity = num_entries(log);
  const int64_t* first = int64_data(head, num_nodes, "head");
  const auto* entry = reinterpret_cast<const Entry*>(int64_data(log, log.numel(), "log"));
  const int64_t* node = int64_data(n_id, n, "n_id");
  check_each_within(node, n, "node", num_nodes);
  check(size >= 0, "size must not be negative");

  thread_local std::unique_ptr<Scratch> own;
  std::unique_ptr<Scratch> kept = std::move(own);  // lost if anything below throws
  if (!kept) kept = std::make_unique<Scratch>();
  kept->at.clear();
  kept->at.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    kept->at.push(checked_entry(first[node[i]], capacity));
    if (kept->at[i]) __builtin_prefetch(entry + kept->at[i] - 1);
  }
  read_entries(entry, capacity, n, size, *kept);
  const int64_t num_edges = kept->event.size();
  check_each_within(kept->neighbor.data(), num_edges, "the log is damaged: node", num_nodes);

  kept->ranks.begin(num_nodes, n + num_edges);
  kept->ranks.add(node, n);
  kept->ranks.add(kept->neighbor.data(), num_edges);
  const Buffer<int64_t>& all = kept->ranks.finish();
  Tensor nodes = pool_empty({all.size()}, ScalarType::Long);
  std::copy_n(all.data(), all.size(), nodes.mutable_data_ptr<int64_t>());
  Tensor edge_index = pool_empty({2, num_edges}, ScalarType::Long);
  int64_t *source = edge_index.mutable_data_ptr<int64_t>(), *target = source + num_edges;
  for (int64_t i = 0; i < num_edges; ++i) source[i] = kept->ranks.of(kept->neighbor[i]);
  for (int64_t i = 0; i < n; ++i) {
    target = std::fill_n(target, kept->count[i], kept->ranks.of(node[i]));
  }
  Tensor e_id = pool_empty({num_edges}, ScalarType::Long);
  std::copy_n(kept->event.data(), num_edges, e_id.mutable_data_ptr<int64_t>());
  if (kept->bytes() <= kKeptBytes) own = std::move(kept);
  return {nodes, edge_index, e_id};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "insert_events(Tensor(a!) head, Tensor(b!) log, Tensor src, Tensor dst, int used, "
      "int first_event) -> ()");
  m.def("last_events(Tensor head, Tensor log, Tensor n_id, int size) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("insert_events", TORCH_BOX(&pyg_scale::insert_events));
  m.impl("last_events", TORCH_BOX(&pyg_scale::last_events));
}
