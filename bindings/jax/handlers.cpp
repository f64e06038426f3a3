// The passes of the C library as handlers of XLA's foreign function interface, for CPUs and for
// CUDA. They know nothing of attention: tilewise.jax writes the structs of tilewise.h when it
// lowers a call, and a handler only puts the addresses of the buffers into them.
//
// A struct arrives as an attribute of 64-bit words in which all pointers are NULL. A second
// attribute lists pairs of numbers: the offset of a pointer in the struct, in bytes, and the buffer
// that it points at. Buffers are numbered from the first operand to the last result. The last
// result is the workspace: it belongs to XLA, so a launch allocates nothing and can be replayed
// from a command buffer (CUDA graph).
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tilewise/tilewise.h"
#include "xla/ffi/api/ffi.h"

namespace tilewise::jax_binding {
namespace {

namespace ffi = xla::ffi;

using Words = ffi::Span<const int64_t>;

// Where a handler runs. XLA makes the GPU of its stream current before it calls a handler.
struct Device {
  int32_t kind;
  int32_t index;
  void* stream;
};

constexpr Device kCpu{.kind = TILEWISE_CPU, .index = 0, .stream = nullptr};

ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "tilewise: " + message);
}

ffi::Error error_of(tilewise_status status) {
  if (status == TILEWISE_OK) return ffi::Error::Success();
  const auto code = status == TILEWISE_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                    : status == TILEWISE_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                        : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string("tilewise: ") + tilewise_last_error());
}

// The operands and results of a call. An empty buffer may have no address, but a NULL pointer would
// switch its option off, so it gets the address of memory that is never read.
class Buffers {
 public:
  Buffers(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results) {
    for (size_t i = 0; i < arguments.size(); ++i) add(arguments.get<ffi::AnyBuffer>(i).value());
    for (size_t i = 0; i < results.size(); ++i) add(*results.get<ffi::AnyBuffer>(i).value());
  }

  size_t size() const { return addresses_.size(); }
  void* operator[](size_t i) const { return addresses_[i]; }

  // The workspace, from its first address that is aligned as the C library asks. The size that
  // tilewise.jax chooses includes the bytes skipped here.
  void* workspace() const { return static_cast<char*>(addresses_.back()) + skipped(); }
  int64_t workspace_bytes() const { return last_bytes_ - skipped(); }

 private:
  static constexpr int64_t kAlignment = 64;

  void add(ffi::AnyBuffer buffer) {
    alignas(kAlignment) static char nothing[kAlignment];
    last_bytes_ = static_cast<int64_t>(buffer.size_bytes());
    addresses_.push_back(last_bytes_ == 0 ? nothing : buffer.untyped_data());
  }

  int64_t skipped() const {
    const auto address = reinterpret_cast<uintptr_t>(addresses_.back());
    return static_cast<int64_t>(-address % kAlignment);
  }

  std::vector<void*> addresses_;
  int64_t last_bytes_ = 0;
};

// Copies a struct out of the attributes and fills in its pointers. An exported computation may
// carry the shorter struct of an older version, which the C library accepts.
template <class Struct>
ffi::Error restore(Words words, Words pointers, const Buffers& buffers, Struct& result) {
  const size_t bytes = words.size() * sizeof(int64_t);
  if (bytes > sizeof(Struct))
    return invalid("the call was lowered by a newer version of tilewise than this library");
  std::memcpy(&result, words.begin(), bytes);
  if (result.struct_size != bytes || pointers.size() % 2 != 0)
    return invalid("the attributes of the call are not those of tilewise.jax");
  for (size_t i = 0; i < pointers.size(); i += 2) {
    const auto offset = static_cast<size_t>(pointers[i]);
    const auto buffer = static_cast<size_t>(pointers[i + 1]);
    if (bytes < sizeof(void*) || offset > bytes - sizeof(void*) || buffer >= buffers.size())
      return invalid("the attributes of the call name a pointer or a buffer that it lacks");
    void* address = buffers[buffer];
    std::memcpy(reinterpret_cast<char*>(&result) + offset, &address, sizeof(address));
  }
  return ffi::Error::Success();
}

// The structs of a problem as attributes. The mask is empty if there is none.
struct Description {
  Words attention;
  Words attention_pointers;
  Words mask;
  Words mask_pointers;
};

struct Problem {
  tilewise_attention attention{};
  tilewise_mask mask{};
};

ffi::Error restore_problem(const Device& device, const Description& description,
                           const Buffers& buffers, Problem& result) {
  if (buffers.size() == 0) return invalid("the call has no buffers");
  tilewise_attention& a = result.attention;
  ffi::Error error = restore(description.attention, description.attention_pointers, buffers, a);
  if (error.failure()) return error;
  a.device = device.kind;
  a.device_index = device.index;
  a.stream = device.stream;
  if (description.mask.size() == 0) return error;
  a.mask = &result.mask;
  return restore(description.mask, description.mask_pointers, buffers, result.mask);
}

// A struct of a pass, besides those of the problem, as attributes.
template <class Struct>
struct Attributes {
  Words words;
  Words pointers;
};

template <class... Structs>
using Pass = tilewise_status (*)(const tilewise_attention*, const Structs*..., void*, int64_t);

// Restores the structs of a pass and calls it.
template <class... Structs>
ffi::Error run(std::type_identity_t<Pass<Structs...>> pass, const Device& device,
               const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results,
               const Description& description, Attributes<Structs>... attributes) {
  const Buffers buffers(arguments, results);
  Problem problem;
  ffi::Error error = restore_problem(device, description, buffers, problem);
  std::tuple<Structs...> structs{};
  // gcc 12 does not count the use in an empty expansion.
  [[maybe_unused]] const auto restore_next = [&](const auto& from, auto& to) {
    if (error.success()) error = restore(from.words, from.pointers, buffers, to);
  };
  (restore_next(attributes, std::get<Structs>(structs)), ...);
  if (error.failure()) return error;
  return error_of(pass(&problem.attention, &std::get<Structs>(structs)..., buffers.workspace(),
                       buffers.workspace_bytes()));
}

// --- one handler per pass and platform -----------------------------------------------------------

ffi::Error forward_on_cpu(ffi::RemainingArgs arguments, ffi::RemainingRets results, Words attention,
                          Words attention_pointers, Words mask, Words mask_pointers) {
  return run(tilewise_forward, kCpu, arguments, results,
             {attention, attention_pointers, mask, mask_pointers});
}

ffi::Error backward_on_cpu(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                           Words attention, Words attention_pointers, Words mask,
                           Words mask_pointers, Words gradients, Words gradients_pointers) {
  return run(tilewise_backward, kCpu, arguments, results,
             {attention, attention_pointers, mask, mask_pointers},
             Attributes<tilewise_gradients>{gradients, gradients_pointers});
}

ffi::Error jvp_on_cpu(ffi::RemainingArgs arguments, ffi::RemainingRets results, Words attention,
                      Words attention_pointers, Words mask, Words mask_pointers, Words tangents,
                      Words tangents_pointers) {
  return run(tilewise_jvp, kCpu, arguments, results,
             {attention, attention_pointers, mask, mask_pointers},
             Attributes<tilewise_tangents>{tangents, tangents_pointers});
}

ffi::Error second_on_cpu(ffi::RemainingArgs arguments, ffi::RemainingRets results, Words attention,
                         Words attention_pointers, Words mask, Words mask_pointers, Words gradients,
                         Words gradients_pointers, Words tangents, Words tangents_pointers) {
  return run(tilewise_second, kCpu, arguments, results,
             {attention, attention_pointers, mask, mask_pointers},
             Attributes<tilewise_tangents>{tangents, tangents_pointers},
             Attributes<tilewise_gradients>{gradients, gradients_pointers});
}

ffi::Error forward_on_cuda(void* stream, int32_t index, ffi::RemainingArgs arguments,
                           ffi::RemainingRets results, Words attention, Words attention_pointers,
                           Words mask, Words mask_pointers) {
  const Device device{.kind = TILEWISE_CUDA, .index = index, .stream = stream};
  return run(tilewise_forward, device, arguments, results,
             {attention, attention_pointers, mask, mask_pointers});
}

ffi::Error backward_on_cuda(void* stream, int32_t index, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, Words attention, Words attention_pointers,
                            Words mask, Words mask_pointers, Words gradients,
                            Words gradients_pointers) {
  const Device device{.kind = TILEWISE_CUDA, .index = index, .stream = stream};
  return run(tilewise_backward, device, arguments, results,
             {attention, attention_pointers, mask, mask_pointers},
             Attributes<tilewise_gradients>{gradients, gradients_pointers});
}

ffi::Error jvp_on_cuda(void* stream, int32_t index, ffi::RemainingArgs arguments,
                       ffi::RemainingRets results, Words attention, Words attention_pointers,
                       Words mask, Words mask_pointers, Words tangents, Words tangents_pointers) {
  const Device device{.kind = TILEWISE_CUDA, .index = index, .stream = stream};
  return run(tilewise_jvp, device, arguments, results,
             {attention, attention_pointers, mask, mask_pointers},
             Attributes<tilewise_tangents>{tangents, tangents_pointers});
}

ffi::Error second_on_cuda(void* stream, int32_t index, ffi::RemainingArgs arguments,
                          ffi::RemainingRets results, Words attention, Words attention_pointers,
                          Words mask, Words mask_pointers, Words gradients,
                          Words gradients_pointers, Words tangents, Words tangents_pointers) {
  const Device device{.kind = TILEWISE_CUDA, .index = index, .stream = stream};
  return run(tilewise_second, device, arguments, results,
             {attention, attention_pointers, mask, mask_pointers},
             Attributes<tilewise_tangents>{tangents, tangents_pointers},
             Attributes<tilewise_gradients>{gradients, gradients_pointers});
}

auto bind_cpu() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets(); }

auto bind_cuda() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

template <class Binding>
auto with_attention(Binding&& binding) {
  return std::move(binding)
      .template Attr<Words>("attention")
      .template Attr<Words>("attention_pointers")
      .template Attr<Words>("mask")
      .template Attr<Words>("mask_pointers");
}

template <class Binding>
auto with_gradients(Binding&& binding) {
  return with_attention(std::move(binding))
      .template Attr<Words>("gradients")
      .template Attr<Words>("gradients_pointers");
}

template <class Binding>
auto with_tangents(Binding&& binding) {
  return std::move(binding)
      .template Attr<Words>("tangents")
      .template Attr<Words>("tangents_pointers");
}

}  // namespace
}  // namespace tilewise::jax_binding

// The handlers are found by name (tilewise._library.jax_adapter), so they are exported.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_forward_cpu, tilewise::jax_binding::forward_on_cpu,
    tilewise::jax_binding::with_attention(tilewise::jax_binding::bind_cpu()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_backward_cpu, tilewise::jax_binding::backward_on_cpu,
    tilewise::jax_binding::with_gradients(tilewise::jax_binding::bind_cpu()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_jvp_cpu, tilewise::jax_binding::jvp_on_cpu,
    tilewise::jax_binding::with_tangents(
        tilewise::jax_binding::with_attention(tilewise::jax_binding::bind_cpu())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_second_cpu, tilewise::jax_binding::second_on_cpu,
    tilewise::jax_binding::with_tangents(
        tilewise::jax_binding::with_gradients(tilewise::jax_binding::bind_cpu())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_forward_cuda, tilewise::jax_binding::forward_on_cuda,
    tilewise::jax_binding::with_attention(tilewise::jax_binding::bind_cuda()),
    {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_backward_cuda, tilewise::jax_binding::backward_on_cuda,
    tilewise::jax_binding::with_gradients(tilewise::jax_binding::bind_cuda()),
    {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_jvp_cuda, tilewise::jax_binding::jvp_on_cuda,
    tilewise::jax_binding::with_tangents(
        tilewise::jax_binding::with_attention(tilewise::jax_binding::bind_cuda())),
    {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    tilewise_jax_second_cuda, tilewise::jax_binding::second_on_cuda,
    tilewise::jax_binding::with_tangents(
        tilewise::jax_binding::with_gradients(tilewise::jax_binding::bind_cuda())),
    {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
