// The trainer reads and writes text, curves, pictures and checkpoints.
#include "examples/train/files.hpp"

#include <cmath>
#include <set>

#include "examples/train/checkpoint.hpp"
#include "examples/train/report/curve.hpp"
#include "examples/train/report/report.hpp"
#include "train_test.hpp"

namespace train {
namespace fs = std::filesystem;
namespace {

class TrainFiles : public ::testing::Test {
 protected:
  fs::path put(const std::string& name, std::string_view bytes) const {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    write_file(path, bytes);
    return path;
  }
  TemporaryFolder folder_;
};

TEST_F(TrainFiles, TextIsFilesEndToEndInOrder) {
  put("in/b.cpp", "second");
  put("in/a.md", "first");
  put("in/c.bin", "no text");
  put("in/build/d.cpp", "no source");
  put("in/.hidden/d.cpp", "no source");
  put("in/deep/e.py", "third");
  const fs::path other = put("other.bin", "named");
  const Text text = load_text(std::vector{folder_ / "in", other}, 4);
  EXPECT_EQ(text.bytes, "firstsecondthirdnamed");
  EXPECT_EQ(text.files, 4U);
  EXPECT_EQ(text.hash, hash_hex(text.bytes));
}

TEST_F(TrainFiles, TextThatIsMissingOrTooShortIsRefused) {
  const auto error_of_text = [](const fs::path& path) {
    return error_of([&] { (void)load_text(std::vector{path}, 4); });
  };
  const float8::Error missing = error_of_text(folder_ / "nothing.txt");
  EXPECT_EQ(missing.code, FLOAT8_NOT_FOUND);
  EXPECT_NE(missing.message.find("nothing.txt"), std::string::npos);
  const float8::Error brief = error_of_text(put("brief.txt", "1234"));
  EXPECT_EQ(brief.code, FLOAT8_INVALID_ARGUMENT);
  EXPECT_NE(brief.message.find("--data"), std::string::npos);
  EXPECT_EQ(load_text(std::vector{put("enough.txt", "12345")}, 4).bytes, "12345");
  fs::create_directory(folder_ / "empty");
  EXPECT_EQ(error_of_text(folder_ / "empty").code, FLOAT8_INVALID_ARGUMENT);
}

// A checkpoint holds hashes, so that the function must not change.
TEST(TrainHash, StaysTheSameAndSeesEachBit) {
  EXPECT_EQ(hash_hex(""), "ffffffffffffffff0000000000000000");
  EXPECT_EQ(hash_hex("the quick brown fox"), "50d1ca67a401d4ac5020782ab685c46e");
  std::string bytes(19, 'a');
  std::set<std::string> hashes = {hash_hex(bytes), hash_hex(bytes + '\0'), hash_hex("")};
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string changed = bytes;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    hashes.insert(hash_hex(changed));
  }
  EXPECT_EQ(hashes.size(), 3 + 8 * bytes.size());
}

TEST_F(TrainFiles, AFileIsReplacedWholeOrNotAtAll) {
  const fs::path path = put("a", "before");
  write_file(path, "after");
  EXPECT_EQ(read_file(path), "after");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()), 1);
  fs::create_directories(folder_ / "b" / "in");
  EXPECT_EQ(error_of([&] { write_file(folder_ / "b", "after"); }).code, FLOAT8_IO);
  EXPECT_EQ(error_of([&] { (void)read_file(folder_ / "b"); }).code, FLOAT8_IO);
}

Curve curve_of(std::string name, std::vector<float> losses) {
  Curve curve{.name = std::move(name), .loss = losses, .lr = losses, .ms = losses};
  curve.tokens_per_step = 16;
  return curve;
}

TEST(TrainCurve, SmoothingIsTheMeanOfTheLastHundred) {
  std::vector<float> losses;
  for (int i = 0; i < 250; ++i) losses.push_back(static_cast<float>(i));
  const auto means = smoothed(losses);
  EXPECT_DOUBLE_EQ(means[0], 0);
  EXPECT_DOUBLE_EQ(means[9], 4.5);
  EXPECT_DOUBLE_EQ(means[99], 49.5);
  EXPECT_DOUBLE_EQ(means[249], 199.5);
}

TEST(TrainCurve, CsvHasARowAStep) {
  EXPECT_EQ(to_csv(curve_of("bf16", {4, 2})),
            "step,tokens,loss,smoothed_loss,lr,ms\n"
            "1,16,4,4,4,4\n"
            "2,32,2,3,2,2\n");
}

// An XML parser reads the document, and finds each curve's loss and difference, with all points
// inside the picture.
TEST_F(TrainFiles, PictureIsWellFormedSvg) {
  std::vector<float> losses;
  for (int i = 0; i < 3000; ++i) losses.push_back(1.0F + 4.0F / static_cast<float>(i + 1));
  const fs::path script = put("check.py", R"(
import sys, xml.etree.ElementTree as tree
svg = '{http://www.w3.org/2000/svg}'
root = tree.parse(sys.argv[1]).getroot()
assert root.tag == svg + 'svg', root.tag
lines = root.findall(svg + 'polyline')
assert len(lines) == 2 * int(sys.argv[2]), len(lines)
for line in lines:
    points = [tuple(map(float, p.split(','))) for p in line.get('points').split()]
    assert len(points) <= 1000
    assert all(70 <= x <= 840 and 30 <= y <= 580 for x, y in points), points
words = [t.text for t in root.findall(svg + 'text')]
for name in sys.argv[3:] + ['step']:
    assert name in words, (name, words)
assert any('nats per byte' in w for w in words)
)");
  const auto check = [&](const std::vector<Curve>& curves, const std::string& names) {
    const fs::path picture = put("loss.svg", to_svg(curves));
    const std::string command = format("'%s' '%s' '%s' %zu %s", FLOAT8_PYTHON, script.c_str(),
                                       picture.c_str(), curves.size(), names.c_str());
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  };
  check({curve_of("bf16", losses), curve_of("a<b&c>", losses)}, "bf16 'a<b&c>'");
  check({curve_of("one", {2.5F})}, "one");
  check({curve_of("nan", {NAN, 1.0F})}, "nan");
  check({}, "");
}

TEST(TrainReport, RatiosAreToTheFirstRun) {
  std::vector<RunResult> runs;
  runs.push_back({curve_of("bf16", {2, 2}), 1000});
  runs.push_back({curve_of("rowwise", {2, 2.5F}), 1500});
  runs.push_back({curve_of("brief", {1}), 0});
  const std::string table = summary(runs);
  EXPECT_NE(table.find("| bf16 | 2 | 2.0000 | 1.0000 | 1000 | 1.000 |\n"), table.npos) << table;
  EXPECT_NE(table.find("| rowwise | 2 | 2.2500 | 1.1250 | 1500 | 1.500 |\n"), table.npos);
  EXPECT_NE(table.find("| brief | 1 | 1.0000 | 0.5000 | - | - |\n"), table.npos);
}

TEST_F(TrainFiles, ReportIsThreeFiles) {
  write_report(folder_.path(), {{curve_of("bf16", {2, 2}), 1000}});
  for (const char* name : {"bf16.csv", "loss.svg", "summary.md"}) {
    EXPECT_TRUE(fs::exists(folder_ / name)) << name;
  }
}

Checkpoint sample() {
  return {.run = "recipe=bf16 seed=1",
          .loss = {5, 4, 3},
          .ms = {9, 1, 1},
          .master = {0.5F, -1, 2, 3},
          .m = {1, 2, 3, 4},
          .v = {5, 6, 7, 8},
          .scales = {7, 0, 9}};
}

TEST_F(TrainFiles, CheckpointComesBack) {
  const fs::path path = folder_ / "a.checkpoint";
  const Checkpoint saved = sample();
  save(path, saved);
  const Checkpoint loaded = load(path, saved.run);
  EXPECT_EQ(loaded.loss, saved.loss);
  EXPECT_EQ(loaded.ms, saved.ms);
  EXPECT_EQ(loaded.master, saved.master);
  EXPECT_EQ(loaded.m, saved.m);
  EXPECT_EQ(loaded.v, saved.v);
  EXPECT_EQ(loaded.scales, saved.scales);
}

TEST_F(TrainFiles, CheckpointOfAnotherRunIsRefused) {
  const fs::path path = folder_ / "a.checkpoint";
  save(path, sample());
  const float8::Error error = error_of([&] { (void)load(path, "recipe=rowwise seed=1"); });
  EXPECT_EQ(error.code, FLOAT8_INVALID_ARGUMENT);
  EXPECT_NE(error.message.find("recipe=bf16"), std::string::npos);
}

TEST_F(TrainFiles, DamagedCheckpointIsRefused) {
  const fs::path path = folder_ / "a.checkpoint";
  save(path, sample());
  const std::string whole = read_file(path);
  const auto expect_refused = [&](std::string_view bytes, size_t at) {
    const fs::path damaged = put("damaged.checkpoint", bytes);
    const float8::Error error = error_of([&] { (void)load(damaged, sample().run); });
    EXPECT_EQ(error.message.find('\n'), std::string::npos) << at;
  };
  for (size_t length = 0; length < whole.size(); ++length) {
    expect_refused(whole.substr(0, length), length);
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    expect_refused(damaged, at);
  }
  expect_refused(whole + "x", whole.size());
  std::string huge = whole;
  huge.replace(huge.find("weights 4"), 9, "weights 99999999999999999999");
  expect_refused(huge, 0);
}

}  // namespace
}  // namespace train
