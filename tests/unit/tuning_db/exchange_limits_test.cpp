// Whole files from strangers and beside others' files: depth, pipes, names, exports at once.
#include <sys/stat.h>

#include <thread>

#include "base/text.hpp"
#include "hostile.hpp"

namespace f8::tuning_db {
namespace {

class ExchangeLimits : public ::testing::Test {
 protected:
  void SetUp() override {
    Database db = Database::open(folder_ / "a.db", OpenMode::kCreate).value();
    sweep(db, {{gemm(8192, 4096, 4096), heuristic(0)}},
          [](const TrialKey&) { return timed(100'000); });
  }
  [[nodiscard]] Database reader() const {
    return Database::open(folder_ / "a.db", OpenMode::kReadOnly).value();
  }
  // Changes the file behind the program's back, with right checksums.
  void tamper(const std::string& statement) {
    exec(folder_ / "a.db", "PRAGMA ignore_check_constraints = ON; " + statement);
    store_checksums_in(folder_ / "a.db");
  }
  TempFolder folder_;
};

const std::string kDeep = std::string(80'000, '[') + std::string(80'000, ']');

TEST_F(ExchangeLimits, ADeepConfigurationInAnImportIsRefused) {
  ASSERT_TRUE(reader().export_jsonl(folder_ / "a.jsonl"));
  std::string text = read_file(folder_ / "a.jsonl").value();
  const std::string config = R"({"heuristic":0})";
  text.replace(text.find(config), config.size(), kDeep);
  Database db = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  const auto count = db.import_jsonl(text, "a.jsonl");
  ASSERT_FALSE(count);
  EXPECT_NE(count.error().message.find("nested deeper than 64"), std::string::npos)
      << count.error().message;
  EXPECT_TRUE(db.runs().value().empty());
}

TEST_F(ExchangeLimits, ADeepConfigurationInAFileIsRefusedOrShownShort) {
  tamper("UPDATE candidate SET config = '" + kDeep + "'");
  const Database db = reader();
  EXPECT_FALSE(db.export_jsonl(folder_ / "out.jsonl"));
  EXPECT_FALSE(fs::exists(folder_ / "out.jsonl"));
  Database other = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  EXPECT_FALSE(other.merge_from(folder_ / "a.db"));
  const auto table = db.table();
  ASSERT_FALSE(table);
  EXPECT_LE(table.error().message.size(), 700U);
  EXPECT_FALSE(db.check());
  (void)db.trials(gemm(8192, 4096, 4096));  // it answers or refuses
}

TEST_F(ExchangeLimits, ANameWithControlsIsNotImportedAndNotExported) {
  ASSERT_TRUE(reader().export_jsonl(folder_ / "a.jsonl"));
  std::string text = read_file(folder_ / "a.jsonl").value();
  const std::string name = "NVIDIA H100";
  text.replace(text.find(name), name.size(), "\\u001b[31mNVIDIA H100");
  Database db = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  const auto count = db.import_jsonl(text, "a.jsonl");
  ASSERT_FALSE(count);
  EXPECT_NE(count.error().message.find("control characters"), std::string::npos)
      << count.error().message;

  tamper(
      "UPDATE device_class SET name = char(27) || '[31m' || char(155) || 'x' || char(10) || 'y'");
  const Database bad = reader();
  if (bad.export_jsonl(folder_ / "out.jsonl")) {
    const std::string out = read_file(folder_ / "out.jsonl").value();
    for (std::string_view rest = out; !rest.empty();)
      EXPECT_FALSE(has_control(take_until(rest, '\n')));
  }
  if (const auto table = bad.table()) {
    const std::string out = table->serialize();
    EXPECT_TRUE(TuningTable::parse(out)) << out;
    for (std::string_view rest = out; !rest.empty();)
      EXPECT_FALSE(has_control(take_until(rest, '\n')));
  }
}

TEST_F(ExchangeLimits, AnExportedCopyTouchesNothingBesideIt) {
  ASSERT_TRUE(write_file_atomic(folder_ / "copy.db.new", "mine"));
  ASSERT_TRUE(write_file_atomic(folder_ / "copy.db", "old"));
  ASSERT_EQ(::chmod((folder_ / "copy.db").c_str(), 0600), 0);
  fs::create_symlink("copy.db", folder_ / "link.db");
  ASSERT_TRUE(reader().export_db(folder_ / "link.db"));
  EXPECT_EQ(read_file(folder_ / "copy.db.new").value(), "mine");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link.db"));
  EXPECT_EQ(fs::status(folder_ / "copy.db").permissions(), fs::perms(0600));
  EXPECT_EQ(Database::open(folder_ / "copy.db", OpenMode::kReadOnly)->runs()->size(), 1U);
}

TEST_F(ExchangeLimits, CopiesAtOnceAllSucceed) {
  std::vector<std::thread> exports;
  for (int i = 0; i < 4; ++i) {
    exports.emplace_back([this] {
      const Database db = reader();
      for (int n = 0; n < 5; ++n) {
        const Status done = db.export_db(folder_ / "copy.db");
        EXPECT_TRUE(done) << done.error().message;
      }
    });
  }
  for (std::thread& one : exports) one.join();
  EXPECT_EQ(Database::open(folder_ / "copy.db", OpenMode::kReadOnly)->runs()->size(), 1U);
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
  }
}

TEST_F(ExchangeLimits, APipeIsImportedAndExportedInto) {
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  std::thread exporting([this] {
    const Status done = reader().export_jsonl(folder_ / "fifo");
    EXPECT_TRUE(done) << done.error().message;
  });
  Database db = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  const auto count = db.import_jsonl(folder_ / "fifo");
  exporting.join();
  ASSERT_TRUE(count) << count.error().message;
  EXPECT_EQ(count->added, 1);
  EXPECT_TRUE(fs::is_fifo(folder_ / "fifo"));

  std::thread copying([this] {
    const Status done = reader().export_db(folder_ / "fifo");
    EXPECT_TRUE(done) << done.error().message;
  });
  const auto bytes = read_file(folder_ / "fifo", kMaxFileBytes, Pipes::kWelcome);
  copying.join();
  ASSERT_TRUE(bytes) << bytes.error().message;
  EXPECT_TRUE(bytes->starts_with("SQLite format 3"));
}

}  // namespace
}  // namespace f8::tuning_db
