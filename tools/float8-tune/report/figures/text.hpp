// The style sheets and the script of the report, embedded by the build.
#pragma once

#include <string_view>

namespace f8::report::text {

extern const std::string_view figure_css;  // of the page and of each SVG file
extern const std::string_view page_css;
extern const std::string_view page_js;

}  // namespace f8::report::text
