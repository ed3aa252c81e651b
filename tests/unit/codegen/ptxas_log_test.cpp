// Reading a compiler's log, on logs as NVRTC 13.0 prints them.
#include "codegen/ptxas_log.hpp"

#include <gtest/gtest.h>

namespace f8::codegen {
namespace {

constexpr std::string_view kTwoKernels =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'cast_2' for 'sm_90a'\n"
    "ptxas info    : Function properties for cast_2\n"
    "ptxas         .     16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 9 barriers, 1040 bytes smem, 8 bytes cmem[0]\n"
    "ptxas info    : Compile time = 3.191 ms\n"
    "ptxas info    : Function properties for _Z1gi\n"
    "ptxas         .     0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
    "ptxas info    : Compiling entry function 'cast' for 'sm_90a'\n"
    "ptxas info    : Function properties for cast\n"
    "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 8 registers, used 0 barriers\n";

TEST(PtxasLog, ReportsTheEntryAskedFor) {
  const PtxasReport first = parse_ptxas_log(kTwoKernels, "cast_2");
  EXPECT_EQ(first.registers, 168);
  EXPECT_EQ(first.spill_bytes, 20 + 24 + 4 + 8);
  EXPECT_EQ(first.smem_bytes, 1040);
  const PtxasReport second = parse_ptxas_log(kTwoKernels, "cast");
  EXPECT_EQ(second.registers, 8);
  EXPECT_EQ(second.spill_bytes, 0);
  EXPECT_EQ(second.smem_bytes, 0);
}

TEST(PtxasLog, AnEntryThatIsNotInTheLogHasZeros) {
  EXPECT_EQ(parse_ptxas_log(kTwoKernels, "amax").registers, 0);
  EXPECT_EQ(parse_ptxas_log("", "cast").registers, 0);
}

TEST(PtxasLog, FindsTheFirstC75Line) {
  EXPECT_EQ(find_c75_line("ptxas info    : 0 bytes gmem\n"
                          "  ptxas info    : (C7510) Potential Performance Loss: wgmma ...\n"
                          "ptxas info    : (C7504) setmaxnreg ignored\n"),
            "ptxas info    : (C7510) Potential Performance Loss: wgmma ...");
  EXPECT_EQ(find_c75_line("C7599"), "C7599");
}

TEST(PtxasLog, OtherCodesAndNamesAreNotC75) {
  for (const char* log : {"", "(C7600) x", "(C751) x", "(C75123) x", "C75", "C750", "kernel_C7510",
                          "C7510_kernel", "(C7410) x"}) {
    EXPECT_EQ(find_c75_line(log), "") << log;
  }
}

TEST(PtxasLog, ErrorsBecomeOneLine) {
  EXPECT_EQ(summarize_errors("k.cu(1): warning #1: w\n  int q = x;\n          ^\n\n"
                             "k.cu(2): error: a\n   x\n   ^\nk.cu(3): error: b\n"
                             "k.cu(4): error: c\nk.cu(5): error: d\n4 errors detected\n"),
            "k.cu(2): error: a | k.cu(3): error: b | k.cu(4): error: c | and 1 more");
  EXPECT_EQ(summarize_errors("ptxas x, line 9; error   : Illegal\nptxas fatal   : aborted\n"),
            "ptxas x, line 9; error   : Illegal | ptxas fatal   : aborted");
}

TEST(PtxasLog, ALogWithoutErrorsIsQuotedAsItIs) {
  EXPECT_EQ(summarize_errors("\n no such thing \n"), "no such thing");
  EXPECT_EQ(summarize_errors(""), "the log is empty");
}

}  // namespace
}  // namespace f8::codegen
