// socket_send, socket_receive: tensors, and rows of matrices by index, through a connected socket
// (the meaning is in pyg_scale/ops/sockets.py).
//
// Rows are gathered into a buffer that stays in the cache, and sent from it; rows that come are
// written from such a buffer to where they belong. Nothing else is copied, and nobody waits for
// the interpreter in the middle of a message.

#include <sys/socket.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "graph_view.h"
#include "prefetch.h"
#include "row_copy.h"

namespace pyg_scale {
namespace {

constexpr int64_t kChunk = int64_t{1} << 18;   // bytes: fits a core's cache, beside the kernel's
constexpr int64_t kSmall = int64_t{16} << 10;  // below, a copy is cheaper than a system call
constexpr int64_t kClosed = -1;

#ifdef MSG_MORE
constexpr int kMore = MSG_MORE;
#else
constexpr int kMore = 0;
#endif
#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_NOSIGNAL;
#else
constexpr int kSendFlags = 0;
#endif

// Of the thread; messages come one after the other.
Buffer<char>& chunk() {
  thread_local Buffer<char> buffer;
  buffer.reserve(kChunk);
  return buffer;
}

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

struct Matrix {
  char* data;
  int64_t count, bytes;  // rows, and bytes of each
};

Matrix matrix_of(const Tensor& tensor, const char* name) {
  check(tensor.is_cpu() && tensor.dim() == 2 && tensor.scalar_type() == ScalarType::Byte &&
            tensor.is_contiguous(),
        std::string(name) + " must be a contiguous uint8 matrix on the CPU");
  return {static_cast<char*>(tensor.mutable_data_ptr()), tensor.size(0), tensor.size(1)};
}

// Sending ########################################################################################

struct Outgoing {
  const char* data = nullptr;  // all of it, or the rows of a matrix
  int64_t bytes = 0;           // of all that is sent
  IntColumn index;             // which rows, if `rows` >= 0
  int64_t rows = -1, row_bytes = 0;
};

class Sender {
 public:
  Sender(int fd, int64_t total) : fd_(fd), left_(total), buffer_(chunk()) { buffer_.clear(); }

  // Each returns 0, or the error's number.
  int send(const Outgoing& out) {
    if (out.rows < 0) return plain(out.data, out.bytes);
    if (out.row_bytes == 0) return 0;
    if (out.row_bytes > kChunk) {
      for (int64_t i = 0; i < out.rows; ++i) {
        if (int error = plain(out.data + out.index[i] * out.row_bytes, out.row_bytes)) return error;
      }
      return 0;
    }
    for (int64_t i = 0; i < out.rows;) {
      const int64_t fit = (kChunk - buffer_.size()) / out.row_bytes;
      const int64_t n = std::min(out.rows - i, fit);
      if (n == 0) {
        prefetch(out, i, i + rows_ahead(out.row_bytes));  // comes while the kernel copies
        if (int error = flush()) return error;
        continue;
      }
      gather(out, i, i + n);
      i += n;
    }
    return 0;
  }

  int flush() {
    const int error = write(buffer_.data(), buffer_.size());
    buffer_.clear();
    return error;
  }

 private:
  int plain(const char* data, int64_t bytes) {
    if (bytes <= kSmall) {
      if (buffer_.size() + bytes > kChunk) {
        if (int error = flush()) return error;
      }
      buffer_.append(data, bytes);
      return 0;
    }
    if (int error = flush()) return error;
    return write(data, bytes);
  }

  PYG_SCALE_PREFETCH static void prefetch(const Outgoing& out, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < std::min(end, out.rows); ++i) {
      prefetch_row_start(out.data + out.index[i] * out.row_bytes, out.row_bytes);
    }
  }

  void gather(const Outgoing& out, int64_t begin, int64_t end) {
    const int64_t bytes = out.row_bytes;
    const int64_t ahead = rows_ahead(bytes);
    char* to = buffer_.data() + buffer_.size();
    prefetch(out, begin, std::min(begin + ahead, end));
    for (int64_t i = begin; i < end; ++i, to += bytes) {
      // The page is looked up once, before all lines of the row need it.
      if (i + 2 * ahead < end)
        __builtin_prefetch(out.data + out.index[i + 2 * ahead] * bytes, 0, 2);
      if (i + ahead < end) prefetch(out, i + ahead, i + ahead + 1);
      std::memcpy(to, out.data + out.index[i] * bytes, static_cast<size_t>(bytes));
    }
    buffer_.set_size(buffer_.size() + (end - begin) * bytes);
  }

  int write(const char* data, int64_t bytes) {
    left_ -= bytes;
    while (bytes > 0) {
      const auto sent =
          ::send(fd_, data, static_cast<size_t>(bytes), kSendFlags | (left_ > 0 ? kMore : 0));
      if (sent < 0) {
        if (errno == EINTR) continue;
        return errno;
      }
      data += sent;
      bytes -= sent;
    }
    return 0;
  }

  int fd_;
  int64_t left_;  // bytes that come after what is being written
  Buffer<char>& buffer_;
};

int64_t socket_send(int64_t fd, std::vector<Tensor> data, std::vector<Tensor> index,
                    std::vector<int64_t> rows) {
  check(data.size() == index.size() && data.size() == rows.size(), "lists differ in length");
  std::vector<Outgoing> all(data.size());
  int64_t total = 0;
  for (size_t t = 0; t < data.size(); ++t) {
    Outgoing& out = all[t];
    if (rows[t] < 0) {
      check(data[t].is_cpu() && data[t].is_contiguous(), "data must be contiguous, on the CPU");
      out.data = static_cast<const char*>(data[t].const_data_ptr());
      out.bytes = bytes_of(data[t]);
    } else {
      const Matrix matrix = matrix_of(data[t], "data");
      out.data = matrix.data;
      out.index = int_column(index[t], "index");
      out.rows = index[t].numel();
      out.row_bytes = matrix.bytes;
      out.bytes = out.rows * matrix.bytes;
      // before anything is sent: half a message would be the end of the connection
      if (const int64_t i = first_outside(out.index, out.rows, matrix.count); i < out.rows)
          [[unlikely]] {
        throw std::out_of_range("index[" + std::to_string(i) + "] is " +
                                std::to_string(out.index[i]) + ", but there are only " +
                                std::to_string(matrix.count) + " rows");
      }
    }
    total += out.bytes;
  }
  Sender sender(checked_file(fd), total);
  for (const Outgoing& out : all) {
    if (int error = sender.send(out)) return error;
  }
  return sender.flush();
}

// Receiving ######################################################################################

class Receiver {
 public:
  explicit Receiver(int fd) : fd_(fd) {}

  // Each returns 0, kClosed, or the error's number.
  int64_t read(char* to, int64_t bytes) {
    while (bytes > 0) {
      const auto got = ::recv(fd_, to, static_cast<size_t>(bytes), MSG_WAITALL);
      if (got == 0) return kClosed;
      if (got < 0) {
        if (errno == EINTR) continue;
        return errno;
      }
      to += got;
      bytes -= got;
    }
    return 0;
  }

  // `count` rows, the i-th of which goes to position[k] for every k with take[k] == i.
  int64_t read_rows(const Matrix& out, int64_t count, const int64_t* position, const int64_t* take,
                    int64_t places) {
    if (out.bytes == 0) return 0;
    if (!position) return read(out.data, count * out.bytes);
    const bool large = out.bytes > kChunk;
    Buffer<char> row;  // for rows larger than a chunk
    Buffer<char>& buffer = large ? row : chunk();
    if (large) row.reserve(out.bytes);
    const int64_t most = large ? 1 : kChunk / out.bytes;
    for (int64_t i = 0, k = 0; i < count;) {
      const int64_t n = std::min(most, count - i);
      if (int64_t error = read(buffer.data(), n * out.bytes)) return error;
      const int64_t end = i + n;
      for (; k < places && (take ? take[k] : k) < end; ++k) {
        put_row(out.data + position[k] * out.bytes,
                buffer.data() + ((take ? take[k] : k) - i) * out.bytes, out.bytes);
      }
      i = end;
    }
    streams_end();
    return 0;
  }

 private:
  int fd_;
};

void check_places(const Matrix& out, int64_t count, const int64_t* position, const int64_t* take,
                  int64_t places) {
  check(position || count <= out.count, "there are more rows than out has");
  check(take || !position || places == count, "position must have an entry for each row");
  if (!position) return;
  check(all_within(position, places, out.count), "a position is out of range");
  if (!take) return;
  bool ascends = all_within(take, places, count);
  for (int64_t k = 1; k < places; ++k) ascends &= take[k] >= take[k - 1];
  check(ascends, "take must ascend, and be rows that come");
}

int64_t socket_receive(int64_t fd, std::vector<Tensor> out, std::vector<int64_t> rows,
                       std::vector<Tensor> position, std::vector<Tensor> take) {
  check(out.size() == rows.size() && out.size() == position.size() && out.size() == take.size(),
        "lists differ in length");
  struct Incoming {
    Matrix matrix;
    const int64_t *position = nullptr, *take = nullptr;
    int64_t places = 0;
  };
  std::vector<Incoming> all(out.size());
  for (size_t t = 0; t < out.size(); ++t) {
    Incoming& in = all[t];
    if (rows[t] < 0) {
      check(out[t].is_cpu() && out[t].is_contiguous(), "out must be contiguous, on the CPU");
      in.matrix = {static_cast<char*>(out[t].mutable_data_ptr()), 1, bytes_of(out[t])};
      continue;
    }
    check_apart(out[t], "out", {&position[t], &take[t]});
    in.matrix = matrix_of(out[t], "out");
    in.places = position[t].numel();
    in.position = optional_int64_data(position[t], in.places, "position");
    in.take = optional_int64_data(take[t], in.places, "take");
    check_places(in.matrix, rows[t], in.position, in.take, in.places);
  }
  Receiver receiver(checked_file(fd));
  for (size_t t = 0; t < out.size(); ++t) {
    const Incoming& in = all[t];
    const int64_t error =
        rows[t] < 0 ? receiver.read(in.matrix.data, in.matrix.bytes)
                    : receiver.read_rows(in.matrix, rows[t], in.position, in.take, in.places);
    if (error) return error;
  }
  return 0;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("socket_send(int fd, Tensor[] data, Tensor[] index, int[] rows) -> int");
  m.def(
      "socket_receive(int fd, Tensor(a!)[] out, int[] rows, Tensor[] position, Tensor[] take) -> "
      "int");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("socket_send", TORCH_BOX(&pyg_scale::socket_send));
  m.impl("socket_receive", TORCH_BOX(&pyg_scale::socket_receive));
}
