// Attention and its gradients on a device, see pyg_scale/ops/attention_rules.py.

#include <array>
#include <tuple>
#include <utility>

#include "tensors.h"

namespace pyg_scale::cuda {
namespace {

// Rows of [heads, channels], and the shape that the first of them has.
struct Heads {
  Heads(const OnDevice& device, const Tensor& x, const char* name) : device(device), type(x) {
    check(x.dim() == 3, std::string(name) + " must be of shape [rows, heads, channels]");
    heads = x.size(1);
    channels = x.size(2);
  }
  int64_t size() const { return heads * channels; }

  Rows rows(const Tensor& x, int64_t count, const char* name) const {
    check(x.dim() == 3 && x.size(0) == count && x.size(1) == heads && x.size(2) == channels &&
              x.scalar_type() == type.scalar_type(),
          std::string(name) + " must be of shape [" + std::to_string(count) +
              ", heads, channels], of the type of the other features");
    return Rows(device, x, name);
  }
  Rows rows(const MaybeTensor& x, int64_t count, const char* name) const {
    return x ? rows(*x, count, name) : Rows();
  }
  Tensor numbers(const Tensor& x, int64_t numel, const char* name) const {
    return dense(device, x, accumulator_type(type), numel, name);
  }
  Tensor empty(const std::vector<int64_t>& sizes) const {  // of accumulators
    return empty_like(type, sizes, accumulator_type(type));
  }
  Tensor features(int64_t count) const {
    return empty_like(type, {count, heads, channels}, type.scalar_type());
  }

  const OnDevice& device;
  Tensor type;
  int64_t heads, channels;
};

// The inputs of the logits, with the tensors that hold them.
struct Input {
  Input(const Heads& shape, double number, double dropout, const MaybeTensor& seed) {
    in.number = number;
    in.heads = shape.heads;
    in.channels = shape.channels;
    if (!seed) return;
    check(dropout >= 0 && dropout <= 1, "dropout must be a probability");
    key = dense(shape.device, *seed, ScalarType::Long, 1, "seed");
    in.dropout = {data_of<int64_t>(std::as_const(key)),
                  static_cast<uint64_t>(dropout * 4294967296.0),
                  dropout < 1 ? 1 / (1 - dropout) : 0};
  }

  // `first`, `second`, `third` and `fourth` in the order of the schemas.
  void gat(const Heads& shape, const Graph& graph, const Tensor& x, const Tensor& a_src,
           const Tensor& a_dst, const MaybeTensor& a_edge) {
    value = shape.rows(x, graph.num_columns, "x");
    of_source = shape.numbers(a_src, graph.num_columns * shape.heads, "a_src");
    of_row = shape.numbers(a_dst, graph.num_rows * shape.heads, "a_dst");
    if (a_edge) of_edge = shape.numbers(*a_edge, graph.num_edges * shape.heads, "a_edge");
    in.value = value.matrix;
    in.a_src = data_of(std::as_const(of_source));
    in.a_dst = data_of(std::as_const(of_row));
    in.a_edge = a_edge ? data_of(std::as_const(of_edge)) : nullptr;
  }
  void gatv2(const Heads& shape, const Graph& graph, const Tensor& x_src, const Tensor& x_dst,
             const Tensor& given, const MaybeTensor& x_edge) {
    value = shape.rows(x_src, graph.num_columns, "x_src");
    query = shape.rows(x_dst, graph.num_rows, "x_dst");
    edge = shape.rows(x_edge, graph.num_edges, "x_edge");
    att = shape.numbers(given, shape.size(), "att");
    in.value = value.matrix;
    in.query = query.matrix;
    in.edge = edge.matrix;
    in.att = data_of(std::as_const(att));
  }
  void dot(const Heads& shape, const Graph& graph, const Tensor& q, const Tensor& k,
           const Tensor& v, const MaybeTensor& e) {
    query = shape.rows(q, graph.num_rows, "query");
    key_rows = shape.rows(k, graph.num_columns, "key");
    value = shape.rows(v, graph.num_columns, "value");
    edge = shape.rows(e, graph.num_edges, "edge");
    in.query = query.matrix;
    in.key = key_rows.matrix;
    in.value = value.matrix;
    in.edge = edge.matrix;
  }

  AttentionInput in{};
  Rows value, query, key_rows, edge;
  Tensor att, of_source, of_row, of_edge, key;
};

using Results = std::tuple<Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The one of an op's two features that has a row for each source.
template <Attention kKind>
const Tensor& of_sources(const Tensor& first, const Tensor& second) {
  return kKind == Attention::kDot ? second : first;
}

template <Attention kKind>
void set(Input& input, const Heads& shape, const Graph& graph, const Tensor& first,
         const Tensor& second, const Tensor& third, const MaybeTensor& fourth) {
  if constexpr (kKind == Attention::kGat) input.gat(shape, graph, first, second, third, fourth);
  if constexpr (kKind == Attention::kGatv2) input.gatv2(shape, graph, first, second, third, fourth);
  if constexpr (kKind == Attention::kDot) input.dot(shape, graph, first, second, third, fourth);
}

template <Attention kKind>
Results attention(Tensor indptr, Tensor indices, MaybeTensor edge_id, MaybeTensor, MaybeTensor,
                  MaybeTensor, Tensor first, Tensor second, Tensor third, MaybeTensor fourth,
                  double number, double dropout, MaybeTensor seed, bool need_weights) {
  const OnDevice device(first);
  const Heads shape(device, first, "the features");
  const Edges edges(device, indptr, indices, edge_id, of_sources<kKind>(first, second).size(0),
                    shape.size());
  const Graph& graph = edges.graph;
  Input input(shape, number, dropout, seed);
  set<kKind>(input, shape, graph, first, second, third, fourth);
  Tensor out = shape.features(graph.num_rows);
  Tensor lse = shape.empty({graph.num_rows, shape.heads});
  Tensor weights = shape.empty({need_weights ? graph.num_edges : 0, shape.heads});
  Tensor partial = shape.empty({graph.num_slots() * shape.heads * (shape.channels + 2)});
  const AttentionForward args{graph,        input.in,         data_of(out),
                              data_of(lse), data_of(weights), data_of(partial)};
  device.done(pyg_scale_cuda_attention(&args, static_cast<int32_t>(kKind),
                                       static_cast<int32_t>(type_of(first, "the features")),
                                       device.stream()),
              "attention");
  return {out, lse, weights};
}

// What every gradient is handed besides the features.
struct Given {
  Given(const Heads& shape, const Graph& graph, const Tensor& result, const Tensor& denominator,
        const MaybeTensor& of_edges, const Tensor& grad, const MaybeTensor& of_edges_grad)
      : out(shape.rows(result, graph.num_rows, "out")),
        out_grad(shape.rows(grad, graph.num_rows, "grad")),
        lse(shape.numbers(denominator, graph.num_rows * shape.heads, "lse")) {
    if (!of_edges_grad) return;
    check(of_edges.has_value(), "weights are missing");
    const int64_t count = graph.num_edges * shape.heads;
    weights = shape.numbers(*of_edges, count, "weights");
    weights_grad = shape.numbers(*of_edges_grad, count, "grad of weights");
    has_weights = true;
  }

  void set(AttentionBackward& args) const {
    args.out = out.matrix;
    args.out_grad = out_grad.matrix;
    args.lse = data_of(lse);
    args.weights = has_weights ? data_of(weights) : nullptr;
    args.weights_grad = has_weights ? data_of(weights_grad) : nullptr;
  }

  Rows out, out_grad;
  Tensor lse, weights, weights_grad;
  bool has_weights = false;
};

// The arguments of a gradient; `t_indptr`, `t_indices` and `t_position` are the edges by source.
struct GradientRequest {
  const Tensor &indptr, &indices;
  const MaybeTensor &edge_id, &t_indptr, &t_indices, &t_position;
  const Tensor &first, &second, &third;
  const MaybeTensor& fourth;
  double number, dropout;
  const MaybeTensor& seed;
  const Tensor &out, &lse;
  const MaybeTensor& weights;
  const Tensor& out_grad;
  const MaybeTensor& weights_grad;
};

template <Attention kKind>
Gradients gradients(const GradientRequest& request) {
  const auto& [indptr, indices, edge_id, t_indptr, t_indices, t_position, first, second, third,
               fourth, number, dropout, seed, out, lse, weights, out_grad, weights_grad] = request;
  constexpr bool kGat = kKind == Attention::kGat, kDot = kKind == Attention::kDot;
  const OnDevice device(first);
  const Heads shape(device, first, "the features");
  const int64_t sources = of_sources<kKind>(first, second).size(0), heads = shape.heads;
  const Edges edges(device, indptr, indices, edge_id, sources, shape.size());
  const Graph& graph = edges.graph;
  Input input(shape, number, dropout, seed);
  set<kKind>(input, shape, graph, first, second, third, fourth);
  const Given given(shape, graph, out, lse, weights, out_grad, weights_grad);
  AttentionBackward args{};
  std::optional<Edges> by_source;
  if constexpr (!kDot) {
    by_source.emplace(device, *t_indptr, *t_indices, t_position, graph.num_rows, shape.size());
    args.transposed = by_source->graph;
    check(args.transposed.num_rows == sources && args.transposed.num_edges == graph.num_edges,
          "the edges by source are not those of this graph");
  }
  args.graph = graph;
  args.in = input.in;
  given.set(args);
  const int64_t slots = graph.num_slots(), t_slots = args.transposed.num_slots();
  Tensor mean = shape.empty({graph.num_rows, heads});
  Tensor logits = shape.empty({graph.num_edges, heads});
  Tensor stays = shape.empty({kGat ? 0 : graph.num_edges, heads});
  Tensor partial = shape.empty({kGat ? 0 : slots * shape.size()});
  Tensor partial_value = shape.empty({kDot ? 0 : t_slots * shape.size()});
  Tensor partial_source = shape.empty({kGat ? t_slots * heads : 0});
  Tensor value_grad = shape.features(kDot ? 0 : sources);
  Tensor query_grad = shape.features(kGat ? 0 : graph.num_rows);
  Tensor edge_grad = shape.features(!kGat && fourth ? graph.num_edges : 0);
  Tensor source_grad = shape.empty({kGat ? sources : 0, heads});
  const bool adds_att = kKind == Attention::kGatv2;
  Tensor att_grad = shape.empty({adds_att ? heads : 0, shape.channels});
  const int64_t workers = adds_att ? num_workers(graph, shape.size()) + kAttSegments : 0;
  Tensor partial_att = shape.empty({workers * shape.size()});
  args.mean = data_of(mean);
  args.logits_grad = data_of(logits);
  args.stays = data_of(stays);
  args.partial = data_of(partial);
  args.partial_value = data_of(partial_value);
  args.partial_source = data_of(partial_source);
  args.value_grad = data_of(value_grad);
  args.query_grad = data_of(query_grad);
  args.edge_grad = data_of(edge_grad);
  args.source_grad = data_of(source_grad);
  args.att_grad = data_of(att_grad);
  args.partial_att = data_of(partial_att);
  device.done(pyg_scale_cuda_attention_grad(&args, static_cast<int32_t>(kKind),
                                            static_cast<int32_t>(type_of(first, "the features")),
                                            device.stream()),
              "the gradient of attention");
  if constexpr (kGat) {
    // Adds up what is stored by edge id over the edges of each row: ids stand in for columns.
    Tensor row_grad = shape.empty({graph.num_rows, heads});
    Graph of_rows = graph;
    of_rows.indices = graph.edge_id;
    of_rows.edge_id = {nullptr, false};
    of_rows.num_columns = graph.num_edges;
    of_rows.chunk = chunk_of(graph.num_edges, heads);
    Tensor pieces = shape.empty({of_rows.num_slots() * heads});
    const Sum sum{of_rows,
                  {data_of(std::as_const(logits)), heads},
                  nullptr,
                  1,
                  heads,
                  false,
                  data_of(row_grad),
                  data_of(pieces)};
    device.done(
        pyg_scale_cuda_sum(&sum, static_cast<int32_t>(type_of(logits, "logits")), device.stream()),
        "the gradient of attention");
    return {value_grad, source_grad, row_grad, logits};
  } else if constexpr (kDot) {
    return {query_grad, edge_grad, logits, stays};
  } else {
    return {value_grad, query_grad, att_grad, edge_grad};
  }
}

template <Attention kKind>
Gradients with_transpose(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor t_indptr,
                         Tensor t_indices, Tensor t_position, Tensor first, Tensor second,
                         Tensor third, MaybeTensor fourth, double number, double dropout,
                         MaybeTensor seed, Tensor out, Tensor lse, MaybeTensor weights,
                         Tensor out_grad, MaybeTensor weights_grad) {
  const MaybeTensor by_source[] = {t_indptr, t_indices, t_position};
  return gradients<kKind>({indptr, indices, edge_id, by_source[0], by_source[1], by_source[2],
                           first, second, third, fourth, number, dropout, seed, out, lse, weights,
                           out_grad, weights_grad});
}

Gradients without_transpose(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor query,
                            Tensor key, Tensor value, MaybeTensor edge, double scale,
                            double dropout, MaybeTensor seed, Tensor out, Tensor lse,
                            MaybeTensor weights, Tensor out_grad, MaybeTensor weights_grad) {
  const MaybeTensor none;
  return gradients<Attention::kDot>({indptr, indices, edge_id, none, none, none, query, key, value,
                                     edge, scale, dropout, seed, out, lse, weights, out_grad,
                                     weights_grad});
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) {
  using namespace pyg_scale::cuda;
  m.impl("gat_attention", TORCH_BOX(&attention<Attention::kGat>));
  m.impl("gatv2_attention", TORCH_BOX(&attention<Attention::kGatv2>));
  m.impl("dot_product_attention", TORCH_BOX(&attention<Attention::kDot>));
  m.impl("gat_attention_grad", TORCH_BOX(&with_transpose<Attention::kGat>));
  m.impl("gatv2_attention_grad", TORCH_BOX(&with_transpose<Attention::kGatv2>));
  m.impl("dot_product_attention_grad", TORCH_BOX(&without_transpose));
}
