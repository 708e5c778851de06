// The scheduler of emulator.h: threads as fibers, a block at a time.

#include "emulator.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// Fibers ####################################################################################

namespace emulator {
namespace {

constexpr size_t kStackBytes = size_t{128} << 10;

#if defined(__x86_64__)
// Saves the registers that a called function must preserve, and goes on where another stack was
// left.
extern "C" void pyg_scale_emulator_switch(void** left, void* next);
asm(R"(
.text
.globl pyg_scale_emulator_switch
.hidden pyg_scale_emulator_switch
.type pyg_scale_emulator_switch, @function
pyg_scale_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pyg_scale_emulator_switch, .-pyg_scale_emulator_switch
)");

struct Context {
  void* at = nullptr;
  void prepare(char* stack, void (*entry)()) {
    // As if `entry` had been called: its return address is at an odd multiple of 8.
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    at = top;
  }
};
void change(Context& from, Context& to) { pyg_scale_emulator_switch(&from.at, to.at); }
#else
struct Context {
  ucontext_t at;
  void prepare(char* stack, void (*entry)()) {
    getcontext(&at);
    at.uc_stack.ss_sp = stack;
    at.uc_stack.ss_size = kStackBytes;
    at.uc_link = nullptr;
    makecontext(&at, entry, 0);
  }
};
void change(Context& from, Context& to) { swapcontext(&from.at, &to.at); }
#endif

enum class State { kReady, kAtCollective, kAtBarrier, kAtGrid, kDone };
enum class Outcome { kDone, kAtGrid, kFailed };  // of a block

struct Thread {
  Context context;
  std::unique_ptr<char[]> stack;
  State state = State::kDone;
  dim3 index;
  uint32_t mask = 0;
  uint64_t value = 0;
  const char* what = "";
  uint64_t seen[32] = {};
};

struct Block {
  std::vector<Thread> threads;
  Context scheduler;
  Thread* running = nullptr;
  size_t number = 0;  // of the running thread
  void (*call)(const void*) = nullptr;
  const void* body = nullptr;
  std::string error;
  bool failed = false;
};

thread_local Block block;
thread_local std::string message;

void entry() {
  block.call(block.body);
  block.running->state = State::kDone;
  change(block.running->context, block.scheduler);
  std::abort();  // a thread that is done is not run again
}

void give_way() { change(block.running->context, block.scheduler); }

// Lets the threads of the block go on if all that are not done wait at the same kind of barrier.
bool pass(State barrier) {
  bool waiting = false;
  for (const Thread& thread : block.threads) {
    if (thread.state != barrier && thread.state != State::kDone) return false;
    waiting = waiting || thread.state == barrier;
  }
  for (Thread& thread : block.threads) {
    if (thread.state == barrier) thread.state = State::kReady;
  }
  return waiting;
}

// Lets the lanes of complete collectives go on. Returns whether there was one.
bool resolve() {
  bool any = false;
  const size_t count = block.threads.size();
  for (size_t i = 0; i < count; ++i) {
    Thread& one = block.threads[i];
    if (one.state != State::kAtCollective) continue;
    Thread* warp = block.threads.data() + i / 32 * 32;
    const size_t lanes = count - i / 32 * 32;
    bool complete = true;
    for (size_t lane = 0; lane < 32; ++lane) {
      if (!(one.mask >> lane & 1)) continue;
      complete = complete && lane < lanes && warp[lane].state == State::kAtCollective &&
                 warp[lane].mask == one.mask && warp[lane].what == one.what;
    }
    if (!complete) continue;
    any = true;
    for (size_t lane = 0; lane < 32; ++lane) {
      if (!(one.mask >> lane & 1)) continue;
      for (size_t other = 0; other < 32; ++other) {
        if (one.mask >> other & 1) warp[lane].seen[other] = warp[other].value;
      }
    }
    for (size_t lane = 0; lane < 32; ++lane) {
      if (one.mask >> lane & 1) warp[lane].state = State::kReady;
    }
  }
  if (any) return true;
  return pass(State::kAtBarrier);
}

std::string who(size_t number) {
  return "thread " + std::to_string(number) + " of block " + std::to_string(here.block.x) + ", " +
         std::to_string(here.block.y);
}

// Describes a deadlock: who waits, and for whom.
std::string deadlock() {
  for (size_t i = 0; i < block.threads.size(); ++i) {
    const Thread& one = block.threads[i];
    if (one.state == State::kAtBarrier) return who(i) + " waits at __syncthreads for ever";
    if (one.state != State::kAtCollective) continue;
    for (size_t lane = 0; lane < 32; ++lane) {
      if (!(one.mask >> lane & 1)) continue;
      const size_t other = i / 32 * 32 + lane;
      if (other >= block.threads.size() || block.threads[other].state != State::kAtCollective ||
          block.threads[other].mask != one.mask || block.threads[other].what != one.what) {
        return who(i) + " waits at " + one.what + " for lane " + std::to_string(lane) +
               ", which is not there";
      }
    }
  }
  return "nobody can go on";
}

void prepare_block(size_t count) {
  if (block.threads.size() != count) block.threads = std::vector<Thread>(count);
  for (Thread& thread : block.threads) {
    if (!thread.stack) thread.stack.reset(new char[kStackBytes]);
    thread.context.prepare(thread.stack.get(), entry);
    thread.state = State::kReady;
  }
}

// Runs the block to its end, or until it waits for the others of its grid.
Outcome run_block(bool backward) {
  const size_t count = block.threads.size();
  while (true) {
    bool left = false;
    for (size_t i = 0; i < count; ++i) {
      block.number = backward ? count - 1 - i : i;
      Thread& thread = block.threads[block.number];
      if (thread.state == State::kReady) {
        block.running = &thread;
        here.thread = thread.index;
        change(block.scheduler, thread.context);
        if (block.failed) return Outcome::kFailed;
      }
      left = left || thread.state != State::kDone;
    }
    if (!left) return Outcome::kDone;
    if (resolve()) continue;
    if (pass(State::kAtGrid)) return Outcome::kAtGrid;
    block.error = deadlock();
    return Outcome::kFailed;
  }
}

}  // namespace

// Interface #################################################################################

thread_local Here here;
thread_local Counts counts;

int run(dim3 grid, dim3 size, void (*call)(const void*), const void* body, bool together) {
  const char* order = std::getenv("PYG_SCALE_EMULATOR_ORDER");
  const bool backward = order && std::strcmp(order, "backward") == 0;
  const size_t count = size_t{size.x} * size.y * size.z;
  const size_t blocks = size_t{grid.x} * grid.y * grid.z;
  if (count == 0 || count > 1024 || blocks == 0) return kNoLaunch;
  here.block_size = size;
  here.grid_size = grid;
  // Those that wait for the grid are kept; the fibers of others serve the next block.
  std::vector<Block> waiting(together ? blocks : 0);
  for (size_t rounds = 0, left = blocks; left > 0; ++rounds) {
    size_t done = 0;
    for (size_t i = 0; i < blocks; ++i) {
      const size_t number = backward ? blocks - 1 - i : i;
      here.block = dim3(static_cast<unsigned>(number % grid.x),
                        static_cast<unsigned>(number / grid.x % grid.y),
                        static_cast<unsigned>(number / grid.x / grid.y));
      if (together) std::swap(block, waiting[number]);
      if (rounds == 0) {
        prepare_block(count);
        for (size_t t = 0; t < count; ++t) {
          block.threads[t].index =
              dim3(static_cast<unsigned>(t % size.x), static_cast<unsigned>(t / size.x % size.y),
                   static_cast<unsigned>(t / size.x / size.y));
        }
        block.call = call;
        block.body = body;
        block.failed = false;
      }
      Outcome outcome = run_block(backward);
      if (outcome == Outcome::kAtGrid && !together) {
        block.error = "a block waits for a grid whose blocks do not run together";
        outcome = Outcome::kFailed;
      }
      done += outcome == Outcome::kDone;
      if (outcome == Outcome::kFailed) {
        message = block.error;
        block.threads.clear();  // with their stacks: functions on them never returned
        return kLaunchFailed;
      }
      if (together) std::swap(block, waiting[number]);
    }
    if (done != 0 && done != blocks) {
      message = "some blocks wait for their grid, which others have left";
      return kLaunchFailed;
    }
    left -= done;
  }
  return 0;
}

int lane() { return static_cast<int>(block.number % 32); }

const uint64_t* exchange(uint32_t mask, uint64_t value, const char* what) {
  Thread& me = *block.running;
  if (!(mask >> lane() & 1)) fail("a lane calls a collective whose mask does not name it");
  me.mask = mask;
  me.value = value;
  me.what = what;
  me.state = State::kAtCollective;
  give_way();
  return me.seen;
}

uint64_t read(const uint64_t* values, uint32_t mask, int from, const char* what) {
  if (!(mask >> from & 1)) {
    fail((std::string(what) + " reads lane " + std::to_string(from) + ", which its mask " +
          "does not name")
             .c_str());
  }
  return values[from];
}

void wait_for_block() {
  block.running->state = State::kAtBarrier;
  give_way();
}

void wait_for_grid() {
  block.running->state = State::kAtGrid;
  give_way();
}

void fail(const char* text) {
  block.error = std::string(text) + " (" + who(block.number) + ")";
  block.failed = true;
  give_way();
  std::abort();
}

const char* last_error() { return message.c_str(); }

#if !defined(__SANITIZE_ADDRESS__)
// Called by device code that is compiled with -fsanitize=alignment. A sanitizer brings its own.
// Hands out what was counted since the last call.
extern "C" __attribute__((visibility("default"))) void pyg_scale_emulator_counts(int64_t* four) {
  const emulator::Counts& found = emulator::counts;
  four[0] = found.loads, four[1] = found.bytes, four[2] = found.indices;
  four[3] = found.launches;
  emulator::counts = {};
}

extern "C" void __ubsan_handle_type_mismatch_v1_abort(void*, void*) {
  fail("an address is not a multiple of what is read or written there at once");
}
#endif

// Kernels ###################################################################################

namespace {
std::map<std::string, const Kernel*>& kernels() {
  static std::map<std::string, const Kernel*> all;
  return all;
}
}  // namespace

Kernel::Kernel(const char* name, void (*call)(void** args)) : call(call) { kernels()[name] = this; }

const Kernel* Kernel::find(const char* name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second;
}

std::string Kernel::names() {
  std::string lines;
  for (const auto& [name, kernel] : kernels()) lines += name + "\n";
  return lines;
}

}  // namespace emulator
