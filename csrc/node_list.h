// The nodes of one type in a batch, in order of arrival, and their rows by identity.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "graph_view.h"
#include "relabel.h"

namespace pyg_scale {

class NodeList {
 public:
  // Starts a batch. `max_rows` is what row numbers can hold.
  void begin(int64_t num_nodes, int64_t num_seeds, bool disjoint, int64_t max_rows) {
    check_count(num_nodes, "num_nodes");
    const auto identities =
        static_cast<unsigned __int128>(std::max<int64_t>(num_nodes, 1)) *
        static_cast<unsigned __int128>(disjoint ? std::max<int64_t>(num_seeds, 1) : 1);
    check(identities < (static_cast<unsigned __int128>(1) << 63),
          "disjoint: " + std::to_string(num_seeds) + " seeds times " + std::to_string(num_nodes) +
              " nodes exceed 63 bits; use smaller batches");
    node_.clear();
    seed_.clear();
    num_nodes_ = num_nodes;
    disjoint_ = disjoint;
    max_rows_ = max_rows;
    table_.begin(static_cast<uint64_t>(identities));
  }

  int64_t size() const { return node_.size(); }
  const int64_t* node() const { return node_.data(); }
  const int64_t* seed() const { return disjoint_ ? seed_.data() : nullptr; }
  size_t bytes() const { return node_.bytes() + seed_.bytes() + table_.bytes(); }
  const RelabelTable& table() const { return table_; }

  uint64_t identity(int64_t node, int64_t seed) const {
    const auto own = static_cast<uint64_t>(node);
    return disjoint_ ? static_cast<uint64_t>(seed) * static_cast<uint64_t>(num_nodes_) + own : own;
  }

  // Makes room for `count` more nodes: until then node() and seed() stay valid.
  void reserve_nodes(int64_t count) {
    node_.reserve(node_.size() + count);
    if (disjoint_) seed_.reserve(seed_.size() + count);
  }

  // Adds seeds, each in a row of its own. Looking up equal seeds later finds the first.
  void add_seeds(const int64_t* node, int64_t count, int64_t first_position) {
    reserve(count);
    for (int64_t i = 0; i < count; ++i) {
      if (node[i] < 0 || node[i] >= num_nodes_) [[unlikely]] {
        fail("seed " + std::to_string(node[i]) + " is out of range: there are " +
             std::to_string(num_nodes_) + " nodes");
      }
      const uint64_t key = identity(node[i], first_position + i);
      const auto row = static_cast<uint64_t>(node_.size());
      table_.find_or_insert(key, row);
      node_.push(node[i]);
      if (disjoint_) seed_.push(first_position + i);
    }
    check_size();
  }

  // Looks neighbours up, appends those that are new, and writes their rows. `count` holds the
  // numbers of neighbours of consecutive expanded rows, `seed` the seeds of these rows. `seed` must
  // not be memory of this list, which grows.
  void add_neighbors(const int64_t* neighbor, int64_t num_neighbors, const int64_t* count,
                     const int64_t* seed, uint32_t* out) {
    Block block{count, seed, disjoint_ && num_neighbors ? *count : 0};
    for (int64_t from = 0; from < num_neighbors; from += kBlock) {
      const int64_t n = std::min(kBlock, num_neighbors - from);
      reserve(n);
      table_.use([&](auto& slots) __attribute__((always_inline)) {
        add_block(slots, neighbor + from, n, block, out + from);
      });
      check_size();
    }
  }

 private:
  static constexpr int64_t kBlock = 256;  // neighbours that are looked up together

  static constexpr int64_t kAhead = 32;  // slots that are asked for before they are read

  struct Block {  // where we are among the expanded rows
    const int64_t* count;
    const int64_t* seed;
    int64_t left;
  };

  void check_size() const {
    if (node_.size() > max_rows_) [[unlikely]] {
      fail("the batch has more than " + std::to_string(max_rows_) +
           " nodes of one type: use smaller batches, fewer neighbours or int64 indices");
    }
  }

  void reserve(int64_t count) {
    reserve_nodes(count);
    table_.reserve(node_.size() + count);
  }

  template <typename Slots>
  PYG_SCALE_PREFETCH void add_block(Slots& slots, const int64_t* neighbor, int64_t n, Block& block,
                                    uint32_t* out) {
    uint64_t keys[kBlock];
    int64_t seeds[kBlock];
    for (int64_t i = 0; i < n; ++i) {
      if (disjoint_) {
        while (block.left == 0) {
          ++block.seed;
          block.left = *++block.count;
        }
        --block.left;
        seeds[i] = *block.seed;
        keys[i] = static_cast<uint64_t>(seeds[i] * num_nodes_ + neighbor[i]);
      } else {
        keys[i] = static_cast<uint64_t>(neighbor[i]);
      }
    }
    for (int64_t i = 0; i < std::min(n, kAhead); ++i) slots.prefetch(keys[i]);
    int64_t* node = node_.data();
    int64_t size = node_.size();
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) slots.prefetch(keys[i + kAhead]);
      const uint64_t row = slots.find_or_insert(keys[i], static_cast<uint64_t>(size));
      node[size] = neighbor[i];
      if (disjoint_) seed_[size] = seeds[i];
      size += row == static_cast<uint64_t>(size);
      out[i] = static_cast<uint32_t>(row);
    }
    node_.set_size(size);
    if (disjoint_) seed_.set_size(size);
  }

  Buffer<int64_t> node_, seed_;
  RelabelTable table_;
  int64_t num_nodes_ = 0, max_rows_ = 0;
  bool disjoint_ = false;
};

}  // namespace pyg_scale
