// Records of what earlier calls left in the caller's memory find mistakes that no call sees alone:
// a backward that does not fit its forward, and a first step of delayed scaling that does not say
// so. A context keeps records where it checks pointers or is emulated. Buffers are known by their
// addresses, so a saved buffer that was moved is unknown, and an unknown buffer is accepted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace f8::runtime {

class CallRecords {
 public:
  // The forward that filled a saved buffer.
  struct Forward {
    const void* linear = nullptr;  // null: no forward is known
    int64_t m = 0;
    bool weight_given = false;  // in fp8
  };
  bool moves_saved = false;  // set before the first call: no forward is known
  void set_forward(const void* saved, const Forward& forward);
  [[nodiscard]] Forward forward(const void* saved) const;

  // A scale state is fresh from its initialisation to its first update.
  void set_fresh(const void* state, size_t bytes, bool fresh);
  [[nodiscard]] bool is_fresh(const void* slot) const;  // `slot` lies in a fresh state

 private:
  mutable std::mutex mutex_;
  std::map<const void*, Forward> forwards_;
  std::map<uintptr_t, uintptr_t> fresh_;  // begin and end of each fresh state
};

}  // namespace f8::runtime
