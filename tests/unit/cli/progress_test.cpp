// What a sweep says of its progress: a line for people, JSON where it is asked for.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/float8-tune/sweep/sweep_report.hpp"

namespace f8::cli {
namespace {

using tuning_db::TrialState;

tuner::SweepProgress half_done() {
  tuner::SweepProgress progress;
  progress.trials = 960;
  progress.done = 445;
  progress.states = {{TrialState::kOk, 412}, {TrialState::kPruned, 31}, {TrialState::kWrong, 2}};
  progress.best_speedup = 1.42;
  progress.elapsed_s = 61;
  progress.eta_s = 190;
  return progress;
}

// What a reporter writes in two ticks, and for a trial in between.
std::string written(ProgressMode mode, bool terminal) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* out = ::open_memstream(&text, &size);
  {
    SweepReporter reporter(mode, out, terminal);
    reporter.tick(half_done());
    tuning_db::TrialResult result;
    result.state = TrialState::kOk;
    const Recipe recipe = find_recipe("rowwise").value();
    const Problem problem = Problem::make(Op::kOutput, recipe, {512, 80, 64}).value();
    reporter.finished({.problem = problem, .candidate = {}}, result, half_done());
    reporter.tick(half_done());
    reporter.clear();
  }
  std::fclose(out);
  std::string all(text, size);
  std::free(text);
  return all;
}

TEST(Progress, ALineOnATerminalIsRewrittenAndWiped) {
  const std::string text = written(ProgressMode::kLine, true);
  EXPECT_EQ(text,
            "\r445/960 · 412 ok · 31 pruned · 2 failed · best 1.42x · 1m01 · ETA 3m10\x1b[K"
            "\r\x1b[K");
}

TEST(Progress, APipeGetsNoJsonAndNoEscapes) {
  EXPECT_EQ(written(ProgressMode::kLine, false), "");  // a heartbeat comes after ten seconds
  EXPECT_EQ(written(ProgressMode::kNone, false), "");
  EXPECT_EQ(written(ProgressMode::kNone, true), "");
}

TEST(Progress, JsonEventsWhereTheyAreAskedFor) {
  for (const bool terminal : {false, true}) {
    const std::string text = written(ProgressMode::kJson, terminal);
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
    const auto event = nlohmann::json::parse(text);
    EXPECT_EQ(event["event"], "cell");
    EXPECT_EQ(event["cells"], 960);
  }
}

TEST(Progress, EachOfSeveralGpusHasALine) {
  tuner::GpusProgress progress{.total = half_done(), .gpus = {}};
  tuner::SweepProgress busy;
  busy.done = 300;
  busy.doing = "output/rowwise";
  progress.gpus.push_back({.index = 0, .progress = busy, .lost = {}});
  progress.gpus.push_back({.index = 3, .progress = {}, .lost = "it fell off the bus"});
  const auto ticked = [&](ProgressMode mode, double pause_s) {
    char* text = nullptr;
    size_t size = 0;
    std::FILE* out = ::open_memstream(&text, &size);
    SweepReporter reporter(mode, out, true);
    reporter.tick(progress);
    ::usleep(static_cast<useconds_t>(pause_s * 1e6));
    reporter.tick(progress);
    reporter.clear();
    std::fclose(out);
    std::string all(text, size);
    std::free(text);
    return all;
  };
  const std::string lines =
      "GPU 0 · 300 trials · output/rowwise\x1b[K\n"
      "GPU 3 · lost: it fell off the bus\x1b[K\n"
      "445/960 · 412 ok · 31 pruned · 2 failed · best 1.42x · 1m01 · ETA 3m10\x1b[K";
  EXPECT_EQ(ticked(ProgressMode::kLine, 0.3),
            "\r" + lines + "\x1b[2A\r" + lines + "\x1b[2A\r\x1b[J");
  EXPECT_EQ(ticked(ProgressMode::kNone, 0), "");
}

TEST(Progress, AutoIsJsonBesideJson) {
  Global global;
  EXPECT_EQ(progress_mode("auto", global), ProgressMode::kLine);
  EXPECT_EQ(progress_mode("json", global), ProgressMode::kJson);
  EXPECT_EQ(progress_mode("none", global), ProgressMode::kNone);
  global.json = true;
  EXPECT_EQ(progress_mode("auto", global), ProgressMode::kJson);
  EXPECT_EQ(progress_mode("line", global), ProgressMode::kLine);
  global.quiet = true;
  EXPECT_EQ(progress_mode("json", global), ProgressMode::kNone);
}

}  // namespace
}  // namespace f8::cli
