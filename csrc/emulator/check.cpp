// A program that runs the kernels on small hostile inputs in the emulator and compares them with
// loops in double: to be compiled with sanitizers, and with faults planted, which it must find.
//
// Arguments name what is run (sum, extreme, products, attention, bounds); without arguments, all is
// run. Arrays are allocated to the byte, so that a sanitizer sees accesses beyond their ends.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/abi.h"
#include "driver.h"

namespace {

using namespace pyg_scale::cuda;

uint64_t state = 1;
double draw() {  // uniform in [-1, 1)
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<double>(state >> 11) / static_cast<double>(1ull << 52) - 1;
}

template <typename T>
struct Array {
  explicit Array(int64_t size, T value = T{}) : size(size), data(new T[static_cast<size_t>(size)]) {
    for (int64_t i = 0; i < size; ++i) data[i] = value;
  }
  T& operator[](int64_t i) const { return data[static_cast<size_t>(i)]; }
  T* get() const { return size ? data.get() : nullptr; }
  int64_t size;
  std::unique_ptr<T[]> data;
};

Array<float> random(int64_t size) {
  Array<float> out(size);
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<float>(draw());
  return out;
}

const float kNan = std::nanf("");

struct Edges {
  // Rows with no edge, with one, with a whole chunk and one more or less, and a hub.
  Edges(int64_t columns, int64_t size) : indptr(13), indices(0), ids(0), columns(columns) {
    const int64_t degrees[12] = {0, 1, 255, 256, 257, 0, 700, 3, 2, 1500, 7, 0};
    for (int64_t i = 0; i < 12; ++i) indptr[i + 1] = indptr[i] + degrees[i];
    edges = indptr[12];
    indices = Array<int32_t>(edges);
    ids = Array<int64_t>(edges);
    for (int64_t e = 0; e < edges; ++e) {
      indices[e] = static_cast<int32_t>((draw() + 1) / 2 * static_cast<double>(columns));
      ids[e] = (e * 7 + 3) % edges;  // 7 does not divide it
    }
    graph = {indptr.get(), {indices.get(), false}, {ids.get(), true}, 12, edges,
             columns,      chunk_of(edges, size)};
  }
  Array<int64_t> indptr;
  Array<int32_t> indices;
  Array<int64_t> ids;
  int64_t columns, edges = 0;
  Graph graph;
};

int failures = 0;

void compare(const char* what, int code, const float* found, const std::vector<double>& wanted) {
  if (code) {
    std::printf("%s: error %d: %s\n", what, code, pyg_scale_cuda_error(code));
    ++failures;
    return;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double error = std::abs(found[i] - wanted[i]);
    if (!(error <= 2e-4 * (1 + std::abs(wanted[i])))) {
      std::printf("%s: number %zu is %g, expected %g\n", what, i, found[i], wanted[i]);
      ++failures;
      return;
    }
  }
}

constexpr auto kFloat = static_cast<int32_t>(Type::kFloat);

void check_sum(int64_t size, int64_t heads, bool mean) {
  const Edges of(9, size);
  const Array<float> x = random(9 * size), weight = random(of.edges * heads);
  const Array<float> out(12 * size, kNan), partial(of.graph.num_slots() * size, kNan);
  const Sum args{of.graph, {x.get(), size}, weight.get(), heads, size,
                 mean,     out.get(),       partial.get()};
  const int code = pyg_scale_cuda_sum(&args, kFloat, emulator::kStream);
  std::vector<double> wanted(static_cast<size_t>(12 * size));
  for (int64_t row = 0; row < 12; ++row) {
    for (int64_t e = of.indptr[row]; e < of.indptr[row + 1]; ++e) {
      for (int64_t c = 0; c < size; ++c) {
        const double w = weight[of.ids[e] * heads + c / (size / heads)];
        const auto degree = static_cast<double>(of.indptr[row + 1] - of.indptr[row]);
        wanted[static_cast<size_t>(row * size + c)] +=
            w * x[of.indices[e] * size + c] / (mean ? degree : 1);
      }
    }
  }
  compare("sum", code, out.get(), wanted);
}

void check_extreme(int64_t size) {
  const Edges of(9, size);
  const Array<float> x = random(9 * size);
  const Array<float> out(12 * size, kNan), partial(of.graph.num_slots() * size, kNan);
  const Array<int32_t> arg(12 * size, -7), partial_arg(of.graph.num_slots() * size, -7);
  const Extreme args{of.graph,  {x.get(), size}, nullptr,          1, size, true, out.get(),
                     arg.get(), partial.get(),   partial_arg.get()};
  const int code = pyg_scale_cuda_extreme(&args, kFloat, emulator::kStream);
  std::vector<double> wanted(static_cast<size_t>(12 * size));
  for (int64_t row = 0; row < 12; ++row) {
    for (int64_t c = 0; c < size; ++c) {
      double best = 2;
      for (int64_t e = of.indptr[row]; e < of.indptr[row + 1]; ++e) {
        best = std::fmin(best, x[of.indices[e] * size + c]);
      }
      wanted[static_cast<size_t>(row * size + c)] = best == 2 ? 0 : best;
    }
  }
  compare("extreme", code, out.get(), wanted);
}

void check_products(int64_t size, int64_t heads) {
  const Edges of(9, size);
  const Array<float> x = random(9 * size), grad = random(12 * size);
  const Array<float> out(of.edges * heads, kNan);
  const WeightGrad args{of.graph, {x.get(), size}, {grad.get(), size}, nullptr, heads,
                        size,     false,           out.get()};
  const int code = pyg_scale_cuda_weight_grad(&args, kFloat, emulator::kStream);
  std::vector<double> wanted(static_cast<size_t>(of.edges * heads));
  for (int64_t row = 0; row < 12; ++row) {
    for (int64_t e = of.indptr[row]; e < of.indptr[row + 1]; ++e) {
      for (int64_t c = 0; c < size; ++c) {
        wanted[static_cast<size_t>(of.ids[e] * heads + c / (size / heads))] +=
            double{x[of.indices[e] * size + c]} * grad[row * size + c];
      }
    }
  }
  compare("products", code, out.get(), wanted);
}

void check_attention(int64_t heads, int64_t channels) {
  const int64_t size = heads * channels;
  const Edges of(9, size);
  const Array<float> x = random(9 * size), query = random(12 * size), att = random(size);
  const Array<float> out(12 * size, kNan), lse(12 * heads, kNan);
  const Array<float> partial(of.graph.num_slots() * heads * (channels + 2), kNan);
  AttentionInput in{};
  in.value = {x.get(), size};
  in.query = {query.get(), size};
  in.att = att.get();
  in.number = 0.2;
  in.heads = heads;
  in.channels = channels;
  const AttentionForward args{of.graph, in, out.get(), lse.get(), nullptr, partial.get()};
  const int code = pyg_scale_cuda_attention(&args, static_cast<int32_t>(Attention::kGatv2), kFloat,
                                            emulator::kStream);
  std::vector<double> wanted(static_cast<size_t>(12 * size));
  for (int64_t row = 0; row < 12; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      double total = 0;
      for (const bool last : {false, true}) {
        for (int64_t e = of.indptr[row]; e < of.indptr[row + 1]; ++e) {
          const int64_t from = of.indices[e] * size + h * channels;
          double logit = 0;
          for (int64_t c = 0; c < channels; ++c) {
            const double both = x[from + c] + query[row * size + h * channels + c];
            logit += (both > 0 ? both : 0.2 * both) * att[h * channels + c];
          }
          if (!last) total += std::exp(logit);
          for (int64_t c = 0; last && c < channels; ++c) {
            wanted[static_cast<size_t>(row * size + h * channels + c)] +=
                std::exp(logit) / total * x[from + c];
          }
        }
      }
    }
  }
  compare("attention", code, out.get(), wanted);
}

void check_bounds() {
  const Edges of(9, 4);
  of.indices[40] = 9;  // there are rows 0 to 8
  const Array<float> x = random(9 * 4);
  const Array<float> out(12 * 4), partial(of.graph.num_slots() * 4);
  const Sum args{of.graph, {x.get(), 4}, nullptr, 1, 4, false, out.get(), partial.get()};
  const int code = pyg_scale_cuda_sum(&args, kFloat, emulator::kStream);
  if (!code) {
    std::printf("bounds: an index beyond the last row was followed\n");
    ++failures;
  }
}

}  // namespace

int main(int count, char** names) {
  const auto wanted = [&](const char* name) {
    bool named = count == 1;
    for (int i = 1; i < count; ++i) named = named || std::strcmp(names[i], name) == 0;
    return named;
  };
  for (const int64_t size : {1, 5, 12, 64, 132, 301}) {
    if (wanted("sum")) check_sum(size, 1, size == 5);
    if (wanted("extreme")) check_extreme(size);
    if (wanted("products")) check_products(size, 1);
  }
  if (wanted("sum")) check_sum(12, 3, true);
  if (wanted("products")) check_products(12, 3);
  if (wanted("attention")) {
    check_attention(1, 5);
    check_attention(2, 8);
    check_attention(3, 150);
    check_attention(1, 33);
  }
  if (wanted("bounds")) check_bounds();
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
