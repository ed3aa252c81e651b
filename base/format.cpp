#include "base/format.hpp"

namespace f8 {

std::string vformat(fmt::string_view format, fmt::format_args args) {
  return fmt::vformat(format, args);
}

}  // namespace f8
