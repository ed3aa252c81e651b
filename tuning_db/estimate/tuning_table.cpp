// Reading checks in this order: the seal, each line, and at last that writing it again gives the
// same bytes.
#include "tuning_db/estimate/tuning_table.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "base/hash.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "recipes/mlp.hpp"
#include "recipes/sealed_text.hpp"

namespace f8 {
namespace {

constexpr SealedKind kKind = {.magic = "float8-table",
                              .version = 5,
                              .oldest = 3,
                              .name = "tuning table",
                              .remedy = "export it again with this one",
                              .made_by = "`float8-tune db export --format table`"};

constexpr std::string_view kNoWord = "-";

constexpr std::array kSpeedupOps = {Op::kLinear, Op::kExperts, Op::kMlp};

Op op_of(const LinearSpeedup& s) {
  if (s.gate) return Op::kMlp;
  return s.groups.experts > 0 ? Op::kExperts : Op::kLinear;
}

std::string linear_key(const LinearSpeedup& s) {
  Dims dims(s.shape);
  if (s.gate) {
    dims = to_dims({s.shape, *s.gate, s.groups});
  } else if (s.groups.experts > 0) {
    dims = {s.groups.experts, s.shape.m, s.shape.n, s.shape.k, s.groups.skew};
  }
  return f8::format("{} {} {}", s.recipe, to_string(dims, spec_of(op_of(s)).dims), s.device);
}

std::string record(const DeviceClass& d) {
  return f8::format("device {} {} {} {} {} {} {} {} {}\n", d.cc, d.sm_count, d.l2_bytes,
                    d.mem_bytes, d.mem_clock_mhz, d.sm_clock_max_mhz, d.power_limit_w,
                    d.mig ? 1 : 0, d.name);
}

std::string word(std::string_view text) {
  return std::string(text.empty() ? kNoWord : text);
}

std::string record(const TableSource& s) {
  return f8::format("source {} {} {} {}\n", s.toolchain.generator, word(s.toolchain.nvrtc),
                    word(s.toolchain.cublaslt), s.name);
}

std::string record(const KernelChoice& c) {
  return f8::format("kernel {} {} {} {}\n", c.problem.key(), to_string(c.kernel.provider),
                    config_text(c.kernel), c.median_ns);
}

std::string record(const LinearSpeedup& s) {
  return f8::format("{} {} {} {} {} {} {} {} {}\n", to_string(op_of(s)), linear_key(s), s.speedup,
                    s.lo, s.hi, s.bf16_ns, s.source, s.date, s.trial);
}

// All that the hash covers.
std::string body(const TuningTable& table) {
  std::string text = first_line(kKind);
  for (const DeviceClass& device : table.devices) text += record(device);
  for (const TableSource& source : table.sources) text += record(source);
  for (const LinearSpeedup& speedup : table.experts()) text += record(speedup);
  for (const KernelChoice& choice : table.choices()) text += record(choice);
  for (const LinearSpeedup& speedup : table.speedups()) text += record(speedup);
  for (const LinearSpeedup& speedup : table.mlps()) text += record(speedup);
  return text;
}

template <class T>
Result<T> parse_count(const char* field, std::string_view text, T limit) {
  const auto value = number_of<T>(text);
  if (value && *value >= T{0} && *value <= limit) return *value;
  return fail(ErrorCode::kCorrupt, "{} {} is no number from 0 to {}", field, quote(text), limit);
}

template <class T>
Result<T> parse_count(const char* field, std::string_view text) {
  return parse_count(field, text, std::numeric_limits<T>::max());
}

bool is_date(std::string_view text) {
  constexpr std::string_view kForm = "0000-00-00";
  return std::ranges::equal(text, kForm, [](char c, char form) {
    return form == '0' ? c >= '0' && c <= '9' : c == form;
  });
}

bool is_trial(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
}

bool is_name(std::string_view text) {
  return !text.empty() && !has_control(text);
}

Status expect_fields(std::string_view line, int64_t fields) {
  const int64_t found = std::ranges::count(line, ' ') + 1;
  if (found == fields) return {};
  return fail(ErrorCode::kCorrupt, "it has {} fields, not {}", found, fields);
}

Result<KernelChoice> parse_choice(std::string_view line) {
  F8_TRY(expect_fields(line, 5));
  std::string_view rest = line;
  take_until(rest, ' ');
  KernelChoice c;
  c.problem = F8_TRY(Problem::parse(take_until(rest, ' ')));
  if (!is_gemm(c.problem.op)) {
    return fail(ErrorCode::kCorrupt, "a {} as a whole has no kernel", to_string(c.problem.op));
  }
  const std::string_view provider = take_until(rest, ' ');
  const bool library = provider == to_string(Provider::kCublasLt);
  if (!library && provider != to_string(Provider::kGenerated)) {
    return fail(ErrorCode::kCorrupt, "unknown provider {}; one of generated, cublaslt",
                quote(provider));
  }
  c.kernel = F8_TRY(parse_gemm_kernel(library ? Provider::kCublasLt : Provider::kGenerated,
                                      take_until(rest, ' ')));
  c.median_ns = F8_TRY(parse_positive("median_ns", rest));
  return c;
}

Result<LinearSpeedup> parse_speedup(Op op, std::string_view line, const TuningTable& table) {
  F8_TRY(expect_fields(line, 11));
  std::string_view rest = line;
  take_until(rest, ' ');
  const auto index = [&rest](const char* field, size_t count) -> Result<size_t> {
    const std::string_view text = take_until(rest, ' ');
    if (count == 0) return fail(ErrorCode::kCorrupt, "{} {}: there is none", field, quote(text));
    return parse_count<size_t>(field, text, count - 1);
  };
  LinearSpeedup s;
  s.recipe = take_until(rest, ' ');
  if (!is_recipe_name(s.recipe)) {
    return fail(ErrorCode::kCorrupt, "recipe {} is not of lower-case letters, digits and '_'",
                quote(s.recipe));
  }
  Problem problem;
  problem.op = op;
  problem.dims = F8_TRY(parse_dims(take_until(rest, ' '), spec_of(op).dims));
  s.shape = problem.shape();
  s.groups = problem.groups();
  if (op == Op::kMlp) s.gate = mlp_shape(problem.dims).gate;
  s.device = F8_TRY(index("device", table.devices.size()));
  s.speedup = F8_TRY(parse_positive("speedup", take_until(rest, ' ')));
  s.lo = F8_TRY(parse_positive("lo", take_until(rest, ' ')));
  s.hi = F8_TRY(parse_positive("hi", take_until(rest, ' ')));
  if (s.lo > s.hi) return fail(ErrorCode::kCorrupt, "lo {} is above hi {}", s.lo, s.hi);
  s.bf16_ns = F8_TRY(parse_positive("bf16_ns", take_until(rest, ' ')));
  s.source = F8_TRY(index("source", table.sources.size()));
  s.date = take_until(rest, ' ');
  if (!is_date(s.date)) return fail(ErrorCode::kCorrupt, "date {} is none", quote(s.date));
  s.trial = rest;
  if (!is_trial(s.trial)) return fail(ErrorCode::kCorrupt, "trial {} is none", quote(s.trial));
  return s;
}

Result<DeviceClass> parse_device(std::string_view line) {
  if (std::ranges::count(line, ' ') < 9) return fail(ErrorCode::kCorrupt, "a device has 10 fields");
  take_until(line, ' ');
  DeviceClass d;
  const auto number = [&line](const char* field, auto& value) -> Status {
    value =
        F8_TRY(parse_count<std::remove_reference_t<decltype(value)>>(field, take_until(line, ' ')));
    return {};
  };
  F8_TRY(number("cc", d.cc));
  F8_TRY(number("sm_count", d.sm_count));
  F8_TRY(number("l2_bytes", d.l2_bytes));
  F8_TRY(number("mem_bytes", d.mem_bytes));
  F8_TRY(number("mem_clock_mhz", d.mem_clock_mhz));
  F8_TRY(number("sm_clock_max_mhz", d.sm_clock_max_mhz));
  F8_TRY(number("power_limit_w", d.power_limit_w));
  d.mig = F8_TRY(parse_count<int>("mig", take_until(line, ' '), 1)) == 1;
  d.name = line;
  if (!is_name(d.name)) return fail(ErrorCode::kCorrupt, "device {} is no name", quote(d.name));
  return d;
}

Result<TableSource> parse_source(std::string_view line) {
  if (std::ranges::count(line, ' ') < 4) return fail(ErrorCode::kCorrupt, "a source has 5 fields");
  take_until(line, ' ');
  TableSource s;
  s.toolchain.generator = F8_TRY(parse_count<int>("generator", take_until(line, ' ')));
  for (auto& [field, version] :
       {std::pair("NVRTC", &s.toolchain.nvrtc), std::pair("cuBLASLt", &s.toolchain.cublaslt)}) {
    const std::string_view text = take_until(line, ' ');
    if (!is_name(text)) return fail(ErrorCode::kCorrupt, "{} {} is no word", field, quote(text));
    if (text != kNoWord) *version = text;
  }
  s.name = line;
  if (!is_name(s.name)) return fail(ErrorCode::kCorrupt, "source {} is no name", quote(s.name));
  return s;
}

bool is_record_of(Op op, std::string_view line) {
  return take(line, to_string(op)) && line.starts_with(' ');
}

// Devices and sources come before the rows that count them.
Status parse_record(std::string_view line, TuningTable& table) {
  const bool has_rows = !table.choices().empty() || !table.speedups().empty() ||
                        !table.experts().empty() || !table.mlps().empty();
  if (line.starts_with("device ") && table.sources.empty() && !has_rows) {
    table.devices.push_back(F8_TRY(parse_device(line)));
    return {};
  }
  if (line.starts_with("source ") && !has_rows) {
    table.sources.push_back(F8_TRY(parse_source(line)));
    return {};
  }
  if (line.starts_with("kernel ")) {
    table.add(F8_TRY(parse_choice(line)));
    return {};
  }
  for (const Op op : kSpeedupOps) {
    if (!is_record_of(op, line)) continue;
    table.add(F8_TRY(parse_speedup(op, line, table)));
    return {};
  }
  return fail(
      ErrorCode::kCorrupt,
      "it is no kernel, linear, experts or mlp, nor a device or a source before all of them");
}

// A line of a table as this version writes it: version 3 spelled keys in another way.
Result<std::string> current_line(int version, std::string_view line) {
  if (version == kKind.version || !line.starts_with("kernel ")) return std::string(line);
  std::string_view rest = line;
  take_until(rest, ' ');
  const Problem problem = F8_TRY(Problem::parse(take_until(rest, ' ')));
  return f8::format("kernel {} {}", problem.key(), rest);
}

// True if these are the lines that the table writes, in any order.
bool are_lines_of(std::vector<std::string> lines, const TuningTable& table) {
  const std::string text = body(table);
  std::string_view rest = text;
  take_until(rest, '\n');
  std::vector<std::string> own;
  while (!rest.empty()) own.emplace_back(take_until(rest, '\n'));
  std::ranges::sort(lines);
  std::ranges::sort(own);
  return lines == own;
}

double log_ratio(double x, double y) {
  return std::abs(std::log2(x / y));
}

double distance(const DeviceClass& a, const DeviceClass& b) {
  double sum = 0;
  for (const auto& [x, y] :
       {std::pair(a.sm_count, b.sm_count), std::pair(a.mem_clock_mhz, b.mem_clock_mhz),
        std::pair(a.sm_clock_max_mhz, b.sm_clock_max_mhz),
        std::pair(a.power_limit_w, b.power_limit_w),
        std::pair(static_cast<int>(a.l2_bytes >> 10), static_cast<int>(b.l2_bytes >> 10))}) {
    if (x > 0 && y > 0) sum += log_ratio(x, y);
  }
  return sum;
}

// Another name, and the distance.
std::pair<bool, double> farness(const DeviceClass& a, const DeviceClass& b) {
  return {a.name != b.name, distance(a, b)};
}

bool same_but_shape(const Problem& a, const Problem& b) {
  return a.op == b.op && a.recipe == b.recipe && a.a == b.a && a.b == b.b && a.d == b.d &&
         a.fast == b.fast;
}

std::string key_of(const KernelChoice& choice) {
  return choice.problem.key();
}

// Keeps `items` sorted by key; an item with a known key takes the old one's place.
template <class T, class Key>
void insert_sorted(std::vector<T>& items, T item, const Key& key_of) {
  const std::string key = key_of(item);
  if (items.empty() || key_of(items.back()) < key) {  // as the rows of a text come
    items.push_back(std::move(item));
    return;
  }
  const auto at = std::ranges::lower_bound(items, key, {}, key_of);
  if (at != items.end() && key_of(*at) == key) {
    *at = std::move(item);
  } else {
    items.insert(at, std::move(item));
  }
}

// Adds to `items`, which are sorted by key, those of `more` whose keys they lack.
template <class T, class Key>
void add_lacking(std::vector<T>& items, std::vector<T> more, const Key& key_of) {
  std::vector<std::pair<std::string, T>> all;
  all.reserve(items.size() + more.size());
  for (std::vector<T>* some : {&items, &more}) {
    for (T& item : *some) {
      std::string key = key_of(item);
      all.emplace_back(std::move(key), std::move(item));
    }
  }
  using Entry = std::pair<std::string, T>;
  std::ranges::stable_sort(all, {}, &Entry::first);
  const auto repeated = std::ranges::unique(all, {}, &Entry::first);
  items.clear();
  for (auto entry = all.begin(); entry != repeated.begin(); ++entry) {
    items.push_back(std::move(entry->second));
  }
}

}  // namespace

std::string to_string(const ToolchainVersions& versions) {
  return f8::format("NVRTC {}, cuBLASLt {}, generator {}", word(versions.nvrtc),
                    word(versions.cublaslt), versions.generator);
}

void TuningTable::add(KernelChoice choice) {
  insert_sorted(choices_, std::move(choice), key_of);
}

void TuningTable::add(LinearSpeedup speedup) {
  std::vector<LinearSpeedup>& rows = speedup.gate                 ? mlps_
                                     : speedup.groups.experts > 0 ? experts_
                                                                  : speedups_;
  insert_sorted(rows, std::move(speedup), linear_key);
}

TuningTable TuningTable::linears(const std::function<bool(const LinearSpeedup&)>& is_wanted) const {
  TuningTable some;
  some.devices = devices;
  some.sources = sources;
  std::ranges::copy_if(speedups_, std::back_inserter(some.speedups_), is_wanted);
  std::ranges::copy_if(experts_, std::back_inserter(some.experts_), is_wanted);
  std::ranges::copy_if(mlps_, std::back_inserter(some.mlps_), is_wanted);
  return some;
}

void TuningTable::add_behind(const TuningTable& other) {
  add_lacking(choices_, other.choices_, key_of);
  const auto index_in = [](auto& items, const auto& item, const auto& same) {
    const auto found =
        std::ranges::find_if(items, [&](const auto& own) { return same(own, item); });
    if (found != items.end()) return static_cast<size_t>(found - items.begin());
    items.push_back(item);
    return items.size() - 1;
  };
  std::vector<size_t> own_device, own_source;
  for (const DeviceClass& device : other.devices) {
    own_device.push_back(index_in(devices, device, [](const DeviceClass& a, const DeviceClass& b) {
      return a.is_same_class(b);
    }));
  }
  for (const TableSource& source : other.sources) {
    own_source.push_back(index_in(sources, source, std::equal_to<>()));
  }
  const auto with_own_indices = [&](std::vector<LinearSpeedup> rows) {
    for (LinearSpeedup& row : rows) {
      row.device = own_device.at(row.device);
      row.source = own_source.at(row.source);
    }
    return rows;
  };
  add_lacking(speedups_, with_own_indices(other.speedups_), linear_key);
  add_lacking(experts_, with_own_indices(other.experts_), linear_key);
  add_lacking(mlps_, with_own_indices(other.mlps_), linear_key);
}

std::string_view TuningTable::device_name() const {
  return devices.empty() ? std::string_view() : devices.front().name;
}

double octaves_between(Shape a, Shape b) {
  const auto apart = [](int64_t x, int64_t y) {
    return log_ratio(static_cast<double>(x), static_cast<double>(y));
  };
  return std::hypot(apart(a.m, b.m), apart(a.n, b.n), apart(a.k, b.k));
}

const KernelChoice* TuningTable::find(const Problem& problem) const {
  const auto found = std::ranges::find_if(choices_, [&](const KernelChoice& choice) {
    return choice.problem.dims == problem.dims && same_but_shape(choice.problem, problem);
  });
  return found == choices_.end() ? nullptr : &*found;
}

std::vector<TuningTable::Neighbour> TuningTable::neighbours(const Problem& problem,
                                                            size_t most) const {
  std::vector<Neighbour> found;
  for (const KernelChoice& choice : choices_) {
    if (choice.problem.dims == problem.dims || !same_but_shape(choice.problem, problem)) continue;
    found.push_back(
        {&choice, octaves_between(choice.problem.group_shape(), problem.group_shape())});
  }
  std::ranges::stable_sort(found, {}, &Neighbour::octaves);
  found.resize(std::min(found.size(), most));
  return found;
}

std::string TuningTable::serialize() const {
  return seal(body(*this));
}

std::string TuningTable::hash() const {
  return hash_hex(body(*this));
}

Result<TuningTable> TuningTable::parse(std::string_view text) {
  auto [version, rest] = F8_TRY(unseal(kKind, text));
  TuningTable table;
  std::vector<std::string> lines;
  std::string_view previous;
  for (int line_number = 2; !rest.empty(); ++line_number) {
    const std::string_view line = take_until(rest, '\n');
    if (const Status parsed = parse_record(line, table); !parsed) {
      return fail(ErrorCode::kCorrupt, "tuning table, line {}: {}", line_number,
                  parsed.error().message);
    }
    const bool is_row = line.starts_with("kernel ") || std::ranges::any_of(kSpeedupOps, [&](Op op) {
                          return is_record_of(op, line);
                        });
    if (is_row && line <= previous) {
      return fail(ErrorCode::kCorrupt, "tuning table, line {}: not in sorted order", line_number);
    }
    if (is_row) previous = line;
    lines.push_back(F8_TRY(current_line(version, line)));
  }
  if (!are_lines_of(std::move(lines), table)) {
    return fail(
        ErrorCode::kCorrupt,
        "tuning table repeats a problem or writes a number in another way than float8 does");
  }
  return table;
}

void sort_by_nearness(std::vector<DeviceClass>& devices, const DeviceClass& asked) {
  std::ranges::stable_sort(devices, {}, [&](const DeviceClass& d) { return farness(d, asked); });
}

const TuningTable* nearest_table(std::span<const TuningTable> tables, const DeviceClass& device) {
  const TuningTable* nearest = nullptr;
  std::pair<bool, double> least;
  for (const TuningTable& table : tables) {
    if (table.devices.empty() || table.devices.front().cc != device.cc) continue;
    const auto here = farness(table.devices.front(), device);
    if (nearest != nullptr && here >= least) continue;
    least = here;
    nearest = &table;
  }
  return nearest;
}

}  // namespace f8
