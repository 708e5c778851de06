// The load of each part in each quantity that is balanced, and how far it is out of bounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pyg_scale {

class PartLoads {
 public:
  // `weights` is [num_nodes, columns]; `most` and `least` are [parts, columns].
  PartLoads(const int64_t* weights, int64_t num_nodes, int64_t columns, int64_t parts,
            const int64_t* most, const int64_t* least)
      : weights_(weights), columns_(columns), parts_(parts), most_(most), least_(least) {
    load_.assign(static_cast<size_t>(parts * columns), 0);
    total_.assign(static_cast<size_t>(columns), 0);
    for (int64_t v = 0; v < num_nodes; ++v) {
      for (int64_t c = 0; c < columns; ++c) total_[c] += weights[v * columns + c];
    }
    // Columns count alike, however large their numbers are.
    for (const int64_t total : total_) {
      scale_.push_back(std::max<int64_t>(1, kWhole / std::max<int64_t>(1, total)));
    }
  }

  // Whether the excess fits into 62 bits, wherever nodes go.
  bool is_bounded() const {
    __int128 sum = 0;
    for (int64_t c = 0; c < columns_; ++c) {
      __int128 most = total_[c];
      for (int64_t part = 0; part < parts_; ++part) {
        const int64_t at = part * columns_ + c;
        most += std::max<int64_t>(0, least_[at]) + std::max<int64_t>(0, -most_[at]);
      }
      sum += most * scale_[c];
      if (sum >= static_cast<__int128>(1) << 62) return false;
    }
    return true;
  }

  int64_t parts() const { return parts_; }

  void add(int64_t v, int64_t part) { change(v, part, 1); }

  void move(int64_t v, int64_t from, int64_t to) {
    change(v, from, -1);
    change(v, to, 1);
  }

  // The sum of what is above `most` or below `least`.
  int64_t excess() const {
    int64_t sum = 0;
    for (int64_t part = 0; part < parts_; ++part) {
      for (int64_t c = 0; c < columns_; ++c) sum += outside(part, c, 0) * scale_[c];
    }
    return sum;
  }

  // By how much the excess grows if v moves.
  int64_t growth(int64_t v, int64_t from, int64_t to) const {
    int64_t sum = 0;
    for (int64_t c = 0; c < columns_; ++c) {
      const int64_t w = weights_[v * columns_ + c];
      if (w == 0) continue;
      sum += (outside(from, c, -w) - outside(from, c, 0) + outside(to, c, w) - outside(to, c, 0)) *
             scale_[c];
    }
    return sum;
  }

  // Whether the part is above `most` in a column in which v weighs something.
  bool too_full(int64_t v, int64_t part) const {
    for (int64_t c = 0; c < columns_; ++c) {
      if (weights_[v * columns_ + c] && load_[part * columns_ + c] > most_[part * columns_ + c]) {
        return true;
      }
    }
    return false;
  }

  bool any_too_empty() const {
    for (int64_t i = 0; i < parts_ * columns_; ++i) {
      if (load_[i] < least_[i]) return true;
    }
    return false;
  }

 private:
  static constexpr int64_t kWhole = int64_t{1} << 40;

  void change(int64_t v, int64_t part, int64_t sign) {
    for (int64_t c = 0; c < columns_; ++c) {
      load_[part * columns_ + c] += sign * weights_[v * columns_ + c];
    }
  }

  int64_t outside(int64_t part, int64_t c, int64_t change) const {
    const int64_t at = part * columns_ + c, load = load_[at] + change;
    return std::max<int64_t>({0, load - most_[at], least_[at] - load});
  }

  const int64_t* weights_;
  int64_t columns_, parts_;
  const int64_t *most_, *least_;
  std::vector<int64_t> load_, total_, scale_;
};

}  // namespace pyg_scale
