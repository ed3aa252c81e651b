// Reads NVRTC's log, which has ptxas's in it (--ptxas-options=-v). It reads the lines
//
//   ptxas info    : Compiling entry function 'NAME' for 'sm_90a'
//   ptxas         .     0 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
//   ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
//   ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
#pragma once

#include <string>
#include <string_view>

namespace f8::codegen {

struct PtxasReport {
  int registers = 0;
  int spill_bytes = 0;  // stores and loads of the entry and of the functions it calls
  int smem_bytes = 0;   // static
};

// The part of the log about `entry`; zeros where ptxas was not asked for it.
[[nodiscard]] PtxasReport parse_ptxas_log(std::string_view log, std::string_view entry);
// The first line with a code C7500 to C7599 (a serialised wgmma, an ignored setmaxnreg), or empty.
[[nodiscard]] std::string_view find_c75_line(std::string_view log);
// The first few errors joined into one line, for a message; without any, the log's first lines.
[[nodiscard]] std::string summarize_errors(std::string_view log);

}  // namespace f8::codegen
