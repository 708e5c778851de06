// edge_formula: a formula of numbers computed for every edge and reduced at its destination, see
// pyg_scale/ops/edge_formula.py.
//
// The formula is a list of instructions. Each works on whole rows, which lie in the first cache, so
// deciding which one comes next costs little beside it. No row is written for an edge.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "buffer.h"
#include "csr_edges.h"

namespace pyg_scale {
namespace {

// In the order of CODES in pyg_scale/ops/edge_formula.py.
enum Code : int64_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kEqual,
  kGate,
  kNeg,
  kAbs,
  kSign,
  kExp,
  kLog,
  kSqrt,
  kTanh,
  kSigmoid,
  kSoftplus,
  kReciprocal,
  kAddNumber,
  kMulNumber,
  kLeaky,
  kLeakyGate,
  kCodes,
};

// A function of the place of a vector in a row, inlined for the machine of its caller.
#define PYG_SCALE_AT(i) [&](int64_t i) __attribute__((always_inline))

enum End : int64_t { kNeighbor, kOwn, kEdge };
enum Reduce : int64_t { kSum, kLargest, kSmallest };

constexpr int64_t kFields = 5;          // code, first and second operand, number, result
constexpr int64_t kBlockNumbers = 256;  // of a register, if rows are shorter
constexpr int64_t kWide = 64;           // numbers of a row from which on it is a block of its own

struct Instruction {
  Code code;
  int64_t first, second, number, result;
};

// Functions of vectors ######################################################################

template <typename A, typename F>
PYG_SCALE_INLINE void each(A* out, int64_t size, const F& f) {
  for (int64_t i = 0; i < size; i += kLanes<A>) keep<A>(out + i, f(i));
}

constexpr float kNearMost = 80;  // above, exp(20) is a factor, as exp_row ends at 88

// exp of any numbers, which may be those of `out`.
PYG_SCALE_INLINE void exp_of(const float* x, float* out, int64_t size) {
  float held[kBlockNumbers];
  for (int64_t at = 0; at < size; at += kBlockNumbers) {
    const int64_t count = std::min(kBlockNumbers, size - at);
    each(
        held, count, PYG_SCALE_AT(i) {
          const Vector<float> v = load(x + at + i);
          return v > kNearMost ? v - 20.0f : v;
        });
    exp_row(held, count);
    each(
        out + at, count, PYG_SCALE_AT(i) {
          const Vector<float> e = load(static_cast<const float*>(held) + i);
          return load(x + at + i) > kNearMost ? e * 485165195.0f : e;
        });
  }
}
PYG_SCALE_INLINE void exp_of(const double* x, double* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = std::exp(x[i]);
}

// 1 + x for small x would lose digits: the series of 2 artanh(x / (2 + x)), for x from 0 to 1.
PYG_SCALE_INLINE Vector<float> log1p_of(const Vector<float>& x) {
  const Vector<float> z = x / (x + 2.0f), s = z * z;
  Vector<float> p = all(1.0f / 15);
  p = p * s + 1.0f / 13;
  p = p * s + 1.0f / 11;
  p = p * s + 1.0f / 9;
  p = p * s + 1.0f / 7;
  p = p * s + 1.0f / 5;
  p = p * s + 1.0f / 3;
  p = p * s + 1.0f;
  return 2.0f * z * p;
}

PYG_SCALE_INLINE void softplus(const float* x, float* out, int64_t size) {
  float held[kBlockNumbers];
  for (int64_t at = 0; at < size; at += kBlockNumbers) {
    const int64_t count = std::min(kBlockNumbers, size - at);
    each(
        held, count, PYG_SCALE_AT(i) {
          const Vector<float> v = load(x + at + i);
          return v > 0.0f ? -v : v;
        });
    exp_row(held, count);
    each(
        out + at, count, PYG_SCALE_AT(i) {
          const Vector<float> v = load(x + at + i), zero{};
          const Vector<float> e = load(static_cast<const float*>(held) + i);
          return (v < zero ? zero : v) + log1p_of(e);
        });
  }
}
PYG_SCALE_INLINE void softplus(const double* x, double* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {  // from 20 on as in torch
    out[i] = x[i] > 20 ? x[i] : std::max(x[i], 0.0) + std::log1p(std::exp(-std::abs(x[i])));
  }
}

PYG_SCALE_INLINE void tanh_of(const float* x, float* out, int64_t size) {
  float held[kBlockNumbers];
  for (int64_t at = 0; at < size; at += kBlockNumbers) {
    const int64_t count = std::min(kBlockNumbers, size - at);
    each(held, count, PYG_SCALE_AT(i) { return load(x + at + i) * 2.0f; });
    exp_row(held, count);
    each(
        out + at, count, PYG_SCALE_AT(i) {
          const Vector<float> v = load(x + at + i), s = v * v;
          const Vector<float> e = load(static_cast<const float*>(held) + i);
          Vector<float> p =
              all(-1382.0f / 155925);  // the series, where 1 - 2 / (e + 1) loses digits
          p = p * s + 62.0f / 2835;
          p = p * s - 17.0f / 315;
          p = p * s + 2.0f / 15;
          p = p * s - 1.0f / 3;
          p = p * s * v + v;
          return s < 0.09f ? p : 1.0f - 2.0f / (e + 1.0f);
        });
  }
}
PYG_SCALE_INLINE void tanh_of(const double* x, double* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = std::tanh(x[i]);
}

// `size` is a multiple of the lanes of a vector.
template <typename A>
PYG_SCALE_INLINE void execute(Code code, const A* a, const A* b, A n, A* out, int64_t size) {
  const Vector<A> zero{}, one = zero + A{1};
  switch (code) {
    case kAdd: return each(out, size, PYG_SCALE_AT(i) { return load(a + i) + load(b + i); });
    case kSub: return each(out, size, PYG_SCALE_AT(i) { return load(a + i) - load(b + i); });
    case kMul: return each(out, size, PYG_SCALE_AT(i) { return load(a + i) * load(b + i); });
    case kDiv: return each(out, size, PYG_SCALE_AT(i) { return load(a + i) / load(b + i); });
    case kMax:  // of which one is NaN: NaN
      return each(
          out, size, PYG_SCALE_AT(i) {
            const Vector<A> v = load(a + i), w = load(b + i);
            return (v > w) | (v != v) ? v : w;
          });
    case kMin:
      return each(
          out, size, PYG_SCALE_AT(i) {
            const Vector<A> v = load(a + i), w = load(b + i);
            return (v < w) | (v != v) ? v : w;
          });
    case kEqual:
      return each(out, size, PYG_SCALE_AT(i) { return load(a + i) == load(b + i) ? one : zero; });
    case kGate:
      return each(out, size, PYG_SCALE_AT(i) { return load(a + i) > zero ? load(b + i) : zero; });
    case kNeg: return each(out, size, PYG_SCALE_AT(i) { return -load(a + i); });
    case kAbs:
      return each(
          out, size, PYG_SCALE_AT(i) {
            const Vector<A> v = load(a + i);
            return v < zero ? -v : v;
          });
    case kSign:
      return each(
          out, size, PYG_SCALE_AT(i) {
            const Vector<A> v = load(a + i);
            return v > zero ? one : (v < zero ? -one : zero);
          });
    case kExp: return exp_of(a, out, size);
    case kLog:
      for (int64_t i = 0; i < size; ++i) out[i] = std::log(a[i]);
      return;
    case kSqrt:
      for (int64_t i = 0; i < size; ++i) out[i] = std::sqrt(a[i]);
      return;
    case kTanh: return tanh_of(a, out, size);
    case kSigmoid:
      each(out, size, PYG_SCALE_AT(i) { return -load(a + i); });
      exp_of(out, out, size);
      return each(
          out, size,
          PYG_SCALE_AT(i) { return one / (one + load(static_cast<const A*>(out) + i)); });
    case kSoftplus: return softplus(a, out, size);
    case kReciprocal: return each(out, size, PYG_SCALE_AT(i) { return one / load(a + i); });
    case kAddNumber: return each(out, size, PYG_SCALE_AT(i) { return load(a + i) + n; });
    case kMulNumber: return each(out, size, PYG_SCALE_AT(i) { return load(a + i) * n; });
    case kLeaky:
      return each(
          out, size, PYG_SCALE_AT(i) {
            const Vector<A> v = load(a + i);
            return v > zero ? v : v * n;
          });
    case kLeakyGate:
      return each(
          out, size, PYG_SCALE_AT(i) {
            const Vector<A> v = load(b + i);
            return load(a + i) > zero ? v : v * n;
          });
    default: return;
  }
}

template <typename A>
PYG_SCALE_INLINE A sum_of(const A* x, int64_t size) {
  Vector<A> sum{};
  int64_t i = 0;
  for (; i + kLanes<A> <= size; i += kLanes<A>) sum += load(x + i);
  A out = add_lanes<A>(sum);
  for (; i < size; ++i) out += x[i];
  return out;
}

// A call ####################################################################################

template <typename A>
struct Input {
  Rows<A> rows;
  End end;
  int64_t ahead;  // how many edges before it is needed a row is asked for
  bool far;       // rows together are more than a cache holds
};

template <typename A>
struct Kept {
  int64_t slot, width;
  A* out;
};

template <typename A>
struct Formula {
  const CsrEdges& edges;
  std::vector<Input<A>> inputs;
  std::vector<Instruction> code;
  const A* numbers;
  int64_t slots, width, padded, block;  // block: most edges of a block
  std::vector<int64_t> reduced;
  Reduce reduce;
  std::vector<Kept<A>> kept;

  bool is_read_in_place(size_t k) const {
    return block == 1 && inputs[k].rows.size == width && width == padded;
  }
  A start() const {
    constexpr A kInfinity = std::numeric_limits<A>::infinity();
    return reduce == kSum ? A{0} : (reduce == kLargest ? -kInfinity : kInfinity);
  }
  int64_t row_size() const { return static_cast<int64_t>(reduced.size()) * padded; }
};

template <typename A>
struct Machine {
  explicit Machine(const Formula<A>& f) : formula(f) {
    memory.resize(static_cast<size_t>(f.slots * f.block * f.padded));
    for (int64_t k = 0; k < f.slots; ++k) {
      slot.push_back(memory.data() + k * f.block * f.padded);
      at.push_back(slot.back());
    }
  }
  const Formula<A>& formula;
  std::vector<A> memory;
  std::vector<A*> slot;      // the memory of each
  std::vector<const A*> at;  // where each is read

  PYG_SCALE_INLINE void fill(size_t k, int64_t place, const A* row) {
    const Formula<A>& f = formula;
    const int64_t size = f.inputs[k].rows.size;
    A* to = slot[k] + place * f.padded;
    if (size == f.width) {
      std::copy_n(row, size, to);
    } else {
      const int64_t repeat = f.width / size;
      for (int64_t h = 0; h < size; ++h) std::fill_n(to + h * repeat, repeat, row[h]);
    }
  }

  // Rows of the destination itself, `count` times.
  PYG_SCALE_INLINE void begin_row(int64_t row, int64_t count) {
    const Formula<A>& f = formula;
    for (size_t k = 0; k < f.inputs.size(); ++k) {
      if (f.inputs[k].end != kOwn) continue;
      const A* from = f.inputs[k].rows[row];
      if (f.is_read_in_place(k)) {
        at[k] = from;
      } else {
        for (int64_t place = 0; place < count; ++place) fill(k, place, from);
      }
    }
  }

  PYG_SCALE_INLINE void load_block(int64_t begin, int64_t end, int64_t limit) {
    const Formula<A>& f = formula;
    for (size_t k = 0; k < f.inputs.size(); ++k) {
      const Input<A>& input = f.inputs[k];
      if (input.end == kOwn) continue;
      const bool of_edge = input.end == kEdge, in_place = f.is_read_in_place(k);
      for (int64_t e = begin; e < end; ++e) {
        if (const int64_t coming = e + input.ahead; coming < limit) {
          prefetch_row(input.rows[of_edge ? f.edges.id(coming) : f.edges.indices[coming]],
                       input.rows.bytes(), input.far);
        }
        const A* from = input.rows[of_edge ? f.edges.id(e) : f.edges.indices[e]];
        if (in_place) {
          at[k] = from;
        } else {
          fill(k, e - begin, from);
        }
      }
    }
  }

  PYG_SCALE_INLINE void reduce_row(const A* from, A* to) const {
    const int64_t size = formula.padded;
    switch (formula.reduce) {
      case kSum: return execute<A>(kAdd, to, from, A{}, to, size);
      case kLargest: return execute<A>(kMax, from, to, A{}, to, size);
      case kSmallest: return execute<A>(kMin, from, to, A{}, to, size);
    }
  }

  // Edges [begin, end) of a row, whose results are reduced into `total`.
  PYG_SCALE_INLINE void run(int64_t row, int64_t begin, int64_t end, int64_t limit, A* total) {
    const Formula<A>& f = formula;
    std::fill_n(total, f.row_size(), f.start());
    begin_row(row, std::min(f.block, end - begin));
    for (int64_t first = begin; first < end; first += f.block) {
      const int64_t last = std::min(first + f.block, end), size = (last - first) * f.padded;
      load_block(first, last, limit);
      for (const Instruction& each : f.code) {
        execute<A>(each.code, at[each.first], at[each.second], f.numbers[each.number],
                   slot[each.result], size);
      }
      for (size_t k = 0; k < f.reduced.size(); ++k) {
        for (int64_t e = 0; e < last - first; ++e) {
          reduce_row(at[f.reduced[k]] + e * f.padded, total + k * f.padded);
        }
      }
      for (const Kept<A>& kept : f.kept) {
        for (int64_t e = first; e < last; ++e)
          keep_row(kept, e, at[kept.slot] + (e - first) * f.padded);
      }
    }
  }

  PYG_SCALE_INLINE void keep_row(const Kept<A>& kept, int64_t e, const A* from) const {
    A* to = kept.out + formula.edges.id(e) * kept.width;
    if (kept.width == formula.width) {
      std::copy_n(from, kept.width, to);
    } else {
      const int64_t of_head = formula.width / kept.width;
      for (int64_t h = 0; h < kept.width; ++h) to[h] = sum_of(from + h * of_head, of_head);
    }
  }

  // The result of a row without edges is 0.
  void store(int64_t row, const A* total, A* const* out) const {
    const Formula<A>& f = formula;
    const bool empty = f.edges.indptr[row] == f.edges.indptr[row + 1];
    for (size_t k = 0; k < f.reduced.size(); ++k) {
      A* to = out[k] + row * f.width;
      if (empty) {
        std::fill_n(to, f.width, A{0});
      } else {
        std::copy_n(total + static_cast<int64_t>(k) * f.padded, f.width, to);
      }
    }
  }
};

template <typename A>
struct RunRows {
  PYG_SCALE_INLINE void operator()(Machine<A>* machine, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* total, A* const* out) const {
    const int64_t* indptr = machine->formula.edges.indptr;
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      machine->run(row, indptr[row], indptr[row + 1], indptr[last], total);
      machine->store(row, total, out);
    }
  }
};

template <typename A>
struct RunPiece {
  PYG_SCALE_INLINE void operator()(Machine<A>* machine, const Piece* piece, A* total) const {
    machine->run(piece->row, piece->begin, piece->end, piece->end, total);
  }
};

using Ints = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

std::vector<Instruction> checked_code(const Ints& program, int64_t num_inputs, int64_t num_numbers,
                                      int64_t* slots) {
  constexpr int64_t kMost = 1 << 12;
  check(program.size() % kFields == 0 && program.size() / kFields <= kMost,
        "program must have 5 numbers for each of at most 4096 instructions");
  std::vector<Instruction> code;
  std::vector<bool> known(static_cast<size_t>(num_inputs), true);
  for (size_t i = 0; i < program.size(); i += kFields) {
    const Instruction each{static_cast<Code>(program[i]), program[i + 1], program[i + 2],
                           program[i + 3], program[i + 4]};
    const auto is_known = [&](int64_t slot) {
      return slot >= 0 && slot < static_cast<int64_t>(known.size()) &&
             known[static_cast<size_t>(slot)];
    };
    check(each.code >= 0 && each.code < kCodes, "program has an unknown code");
    check(is_known(each.first) && is_known(each.second),
          "program reads a slot before it is written");
    check(each.number >= 0 && each.number < num_numbers, "program reads a number that is missing");
    check(each.result >= num_inputs && each.result < num_inputs + kMost,
          "program writes to a slot that is out of range");
    if (each.result >= static_cast<int64_t>(known.size())) {
      known.resize(static_cast<size_t>(each.result) + 1);
    }
    known[static_cast<size_t>(each.result)] = true;
    code.push_back(each);
  }
  *slots = static_cast<int64_t>(known.size());
  for (const bool is_written : known) check(is_written, "program leaves out a slot");
  return code;
}

// The arguments of the op but for the edges.
struct Request {
  const Tensors& inputs;
  const Ints &ends, &program;
  const Tensor& numbers;
  int64_t width;
  const Ints& reduced;
  int64_t reduce;
  const Ints &kept, &kept_width;
};

template <typename A>
Tensors run(const CsrEdges& edges, const Request& request, ScalarType dtype) {
  const auto& [inputs, ends, program, numbers, width, reduced, reduce, kept, kept_width] = request;
  constexpr int64_t kLane = kLanes<A>;
  const int64_t padded = (width + kLane - 1) / kLane * kLane;
  Formula<A> formula{edges,  {}, {},      const_data_of<A>(numbers),   0, width,
                     padded, 1,  reduced, static_cast<Reduce>(reduce), {}};
  formula.block = padded >= kWide ? 1 : std::max<int64_t>(kBlockNumbers / padded, 1);
  int64_t num_src = std::numeric_limits<int64_t>::max();
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Rows<A> rows = rows_of<A>(inputs[k]);
    formula.inputs.push_back(
        {rows, static_cast<End>(ends[k]), rows.ahead(), lie_in_memory(rows.count, rows.bytes())});
    if (ends[k] == kNeighbor) num_src = std::min(num_src, inputs[k].size(0));
  }
  formula.code =
      checked_code(program, static_cast<int64_t>(inputs.size()), numbers.numel(), &formula.slots);
  Tensors out;
  std::vector<A*> to;
  for (const int64_t slot : reduced) {
    check(slot >= 0 && slot < formula.slots, "reduced has a slot that is missing");
    out.push_back(pool_empty({edges.rows, width}, dtype));
    to.push_back(data_of<A>(out.back()));
  }
  for (size_t k = 0; k < kept.size(); ++k) {
    check(kept[k] >= 0 && kept[k] < formula.slots, "kept has a slot that is missing");
    check(kept_width[k] > 0 && width % kept_width[k] == 0, "kept_width must divide width");
    out.push_back(pool_empty({edges.edges, kept_width[k]}, dtype));
    formula.kept.push_back({kept[k], kept_width[k], data_of<A>(out.back())});
  }
  const auto per_edge = static_cast<int64_t>(formula.code.size() + inputs.size());
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, width * per_edge);
  const int64_t size = formula.row_size();
  std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(size));
  const auto rows = [&](int64_t, int64_t first, int64_t last) {
    edges.check_range(edges.indptr[first], edges.indptr[last], num_src);
    Machine<A> machine(formula);
    std::vector<A> total(static_cast<size_t>(size));
    dispatch(RunRows<A>{}, &machine, &tasks, first, last, total.data(), to.data());
  };
  const auto piece = [&](int64_t i, const Piece& which) {
    edges.check_range(which.begin, which.end, num_src);
    Machine<A> machine(formula);
    dispatch(RunPiece<A>{}, &machine, &which, partial.data() + i * size);
  };
  const auto merge = [&](const LongRow& row) {
    const Machine<A> machine(formula);
    A* total = partial.data() + row.first * size;
    for (int64_t i = row.first + 1; i < row.last; ++i) {
      for (int64_t at = 0; at < size; at += padded) {
        machine.reduce_row(partial.data() + i * size + at, total + at);
      }
    }
    machine.store(row.row, total, to.data());
  };
  run_tasks(tasks, rows, piece, merge);
  return out;
}

Tensors edge_formula(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensors inputs, Ints ends,
                     Ints program, Tensor numbers, int64_t width, Ints reduced, int64_t reduce,
                     Ints kept, Ints kept_width) {
  const CsrEdges edges(indptr, indices, edge_id);
  check(!inputs.empty() && ends.size() == inputs.size(), "ends must have one entry per input");
  check(width > 0 && width <= (int64_t{1} << 24), "width must be from 1 to 2**24");
  check(kept.size() == kept_width.size(), "kept_width must have one entry per slot kept");
  check(reduce >= kSum && reduce <= kSmallest, "reduce must be 0 (sum), 1 (max) or 2 (min)");
  const ScalarType dtype = inputs[0].scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::Double,
        "inputs must be float32 or float64");
  for (size_t k = 0; k < inputs.size(); ++k) {
    check(ends[k] >= kNeighbor && ends[k] <= kEdge,
          "ends must be 0 (neighbor), 1 (own) or 2 (edge)");
    check(inputs[k].dim() == 2 && inputs[k].scalar_type() == dtype,
          "inputs must be matrices of one type");
    inputs[k] = with_rows(inputs[k], "inputs");
    const int64_t size = inputs[k].size(1);
    check(size > 0 && width % size == 0, "the columns of inputs must divide width");
    check(ends[k] == kNeighbor || inputs[k].size(0) == (ends[k] == kOwn ? edges.rows : edges.edges),
          "inputs must have one row per destination (own) or per edge (edge)");
  }
  numbers = dense(numbers, dtype, numbers.numel(), "numbers");
  check(numbers.numel() > 0, "numbers must not be empty");
  const Request request{inputs, ends, program, numbers, width, reduced, reduce, kept, kept_width};
  return dtype == ScalarType::Double ? run<double>(edges, request, dtype)
                                     : run<float>(edges, request, dtype);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "edge_formula(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor[] inputs, int[] ends, "
      "int[] program, Tensor numbers, int width, int[] reduced, int reduce, int[] kept, "
      "int[] kept_width) -> Tensor[]");
  m.def(  // the same on a device, by a module that is generated: see edge_formula_ops.cpp
      "edge_formula_compiled(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor[] inputs, "
      "int[] ends, str module, float[] numbers, int width, int reduced, int[] kept) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("edge_formula", TORCH_BOX(&pyg_scale::edge_formula));
}
