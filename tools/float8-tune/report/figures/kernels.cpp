#include "tools/float8-tune/report/figures/kernels.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "tools/float8-tune/report/figures/cells.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::report {
namespace {

// A share of the roof, under a head that says per cent.
std::string share_text(double share) {
  return f8::format("{:.1f}", 100 * share);
}

// The faster one of generated and library.
const Kernel* fastest_fp8(const GemmTimes& times) {
  const Kernel* best = times.generated ? &*times.generated : nullptr;
  if (times.library && (best == nullptr || times.library->ns < best->ns)) best = &*times.library;
  return best;
}

struct Point {
  const GemmTimes* times;
  const Kernel* kernel;
  bool bf16;
  double intensity, tflops;
};

std::vector<Point> points_of(const Measurements& measurements, size_t device,
                             const std::string& recipe) {
  std::vector<Point> points;
  const auto add = [&points](const GemmTimes& times, const Kernel* kernel, bool bf16) {
    if (kernel == nullptr) return;
    const double flops = times.problem.flops();
    points.push_back(
        {&times, kernel, bf16, flops / bytes_of(times.problem, bf16), flops / kernel->ns / 1e3});
  };
  for (const bool bf16 : {true, false}) {  // fp8 is drawn last
    for (const GemmTimes& times : measurements.gemms) {
      if (times.device != device || times.problem.recipe != recipe) continue;
      add(times, bf16 ? (times.bf16 ? &*times.bf16 : nullptr) : fastest_fp8(times), bf16);
    }
  }
  return points;
}

void draw_roof(Drawing& drawing, const Axis& x, const Axis& y, double flops, double bytes,
               std::string_view style, std::string_view label) {
  const double ridge = flops / bytes;
  const double tflops = flops / 1e12;
  // The slope begins where it enters the frame.
  const double from = std::max(x.lo(), y.lo() * 1e12 / bytes);
  std::string d;
  if (from < ridge) {
    d = f8::format("M{:.1f} {:.1f}", x.at(from), y.at(from * bytes / 1e12));
    d += f8::format("L{:.1f} {:.1f}", x.at(ridge), y.at(tflops));
  } else {
    d = f8::format("M{:.1f} {:.1f}", x.at(x.lo()), y.at(tflops));
  }
  d += f8::format("H{:.1f}", x.at(x.hi()));
  drawing.path(d, f8::format("roof {}", style));
  drawing.text(x.at(x.hi()) - 4, y.at(tflops) - 5, label, Drawing::Anchor::kEnd, "small");
}

// The share of its roof that a GEMM reaches.
double share_of(const Point& p, const Roofs& roofs) {
  const double peak = p.bf16 ? roofs.bf16_flops : roofs.fp8_flops;
  return p.tflops * 1e12 / std::min(peak, p.intensity * roofs.bytes);
}

// A row for each GEMM: its fp8 kernel, and its bf16 one.
std::vector<std::vector<std::string>> numbers_of(const std::vector<Point>& points,
                                                 const std::optional<Roofs>& roofs) {
  std::map<const GemmTimes*, std::array<const Point*, 2>> gemms;  // in the points' order
  for (const Point& p : points) gemms[p.times][p.bf16 ? 1 : 0] = &p;
  std::vector<std::vector<std::string>> rows;
  for (const auto& [times, types] : gemms) {
    std::vector<std::string>& row = rows.emplace_back(name_cells(times->problem));
    for (const Point* p : types) {
      row.push_back(p != nullptr ? f8::format("{:.0f}", p->intensity) : "-");
      row.push_back(p != nullptr ? f8::format("{:.0f}", p->tflops) : "-");
      row.push_back(p != nullptr && roofs ? share_text(share_of(*p, *roofs)) : "-");
      row.push_back(p != nullptr && p->kernel->sm_mhz ? f8::format("{:.0f}", *p->kernel->sm_mhz)
                                                      : "-");
    }
  }
  return rows;
}

std::string words_on_roofs(const std::vector<Point>& points, const std::optional<Roofs>& roofs,
                           double sm_mhz, int max_mhz) {
  if (!roofs) {
    return f8::format("The settled clock is {:.0f} MHz; the roofs of this device are not known.",
                      sm_mhz);
  }
  std::vector<double> shares;
  for (const Point& p : points) {
    if (!p.bf16) shares.push_back(share_of(p, *roofs));
  }
  return f8::format(
      "The roofs are those at the settled clock, {:.0f} MHz (the median while fp8 kernels ran; the "
      "device's maximum is {} MHz), and {:.0f} GB/s of memory. The median fp8 GEMM reaches {} of "
      "its "
      "roof.",
      sm_mhz, max_mhz, roofs->bytes / 1e9, percent(tuner::median(shares)));
}

// The parts of a linear's time, as they are drawn from left to right.
constexpr struct {
  const char *name, *letter, *style;
} kParts[] = {{"output GEMM", "y", "part0"},
              {"grad_input GEMM", "dx", "part1"},
              {"grad_weight GEMM", "dw", "part2"},
              {"amax, casts and gaps", "cast", "part3"}};

std::string bar_style(size_t part) {
  return f8::format("bar {}", kParts[part].style);
}

std::vector<const LinearTimes*> linears_of(const Measurements& measurements, size_t device,
                                           const std::string& recipe, int64_t m) {
  std::vector<const LinearTimes*> linears;
  for (const LinearTimes& linear : measurements.linears) {
    const bool is_known = linear.fp8.rest_ns() && linear.bf16.rest_ns();
    if (linear.device == device && linear.recipe == recipe && linear.shape.m == m && is_known) {
      linears.push_back(&linear);
    }
  }
  std::ranges::stable_sort(linears, std::greater{},
                           [](const LinearTimes* l) { return l->shape.n * l->shape.k; });
  linears.resize(std::min(linears.size(), kMaxLinears));
  return linears;
}

std::vector<double> parts_of(const LinearTimes::Side& side) {
  std::vector<double> parts;
  for (const auto& gemm : side.gemm_ns) parts.push_back(*gemm);
  parts.push_back(std::max(0.0, *side.rest_ns()));
  return parts;
}

// Bars are shares of the bf16 linear's time, so that small and large shapes fit one figure.
void draw_bar(Drawing& drawing, const Axis& x, double y, const LinearTimes::Side& side,
              double bf16_ns, bool has_letters) {
  double sum = 0;
  const std::vector<double> parts = parts_of(side);
  for (size_t i = 0; i < parts.size(); ++i) {
    const double from = std::round(x.at(sum));
    sum += 100 * parts[i] / bf16_ns;
    const double to = std::round(x.at(sum));
    if (to > from) drawing.bar(from, y + 8, std::max(1.0, to - from - 1), bar_style(i));
    const double needed = i == 3 ? 30 : 18;
    if (has_letters && to - from >= needed) {
      drawing.text((from + to) / 2, y + 11.5, kParts[i].letter, Drawing::Anchor::kMiddle, "small");
    }
  }
}

void draw_part_legend(Drawing& drawing, double top) {
  for (size_t i = 0; i < std::size(kParts); ++i) {
    const double at = i % 2 == 0 ? 8 : 210;
    const double y = top + (i < 2 ? 0 : 22);
    drawing.bar(at, y + 8, 32, bar_style(i));
    drawing.text(at + 16, y + 12, kParts[i].letter, Drawing::Anchor::kMiddle, "small");
    drawing.text(at + 38, y + 12, kParts[i].name, Drawing::Anchor::kStart, "small");
  }
}

std::vector<std::string> numbers_of(Shape shape, const char* type, const LinearTimes::Side& side) {
  std::vector<std::string> row = {f8::format("{}", shape.n), f8::format("{}", shape.k), type,
                                  microseconds(side.ns)};
  const std::vector<double> parts = parts_of(side);
  for (const double part : parts) row.push_back(microseconds(part));
  row.push_back(percent(parts.back() / side.ns));
  return row;
}

}  // namespace

std::optional<Roofs> roofs_of(const DeviceClass& device, double sm_mhz) {
  if (device.cc != 90 || device.sm_count <= 0 || device.mem_clock_mhz <= 0) return std::nullopt;
  // Of Hopper's SM in a clock: 4096 dense fp8 fused multiply-adds, half as many in bf16. Its HBM
  // stacks have 1024 data lines each; a board with more than 80 GiB has six, the others five.
  const double clocks = device.sm_count * sm_mhz * 1e6;
  const double lanes = device.mem_bytes > (int64_t{80} << 30) ? 6144 : 5120;
  return Roofs{.fp8_flops = 8192 * clocks,
               .bf16_flops = 4096 * clocks,
               .bytes = 2e6 * device.mem_clock_mhz * lanes / 8};
}

double bytes_of(const Problem& gemm, bool bf16) {
  Problem problem = gemm;
  if (bf16) problem.a = problem.b = Dtype::kBf16;
  return problem.bytes();
}

std::optional<double> settled_mhz(const Measurements& measurements, size_t device,
                                  const std::string& recipe) {
  std::vector<double> clocks;
  for (const GemmTimes& times : measurements.gemms) {
    const Kernel* kernel = fastest_fp8(times);
    if (times.device != device || times.problem.recipe != recipe || kernel == nullptr) continue;
    if (kernel->sm_mhz) clocks.push_back(*kernel->sm_mhz);
  }
  if (clocks.empty()) return std::nullopt;
  return tuner::median(clocks);
}

std::optional<Figure> roofline(const Measurements& measurements, size_t device,
                               const std::string& recipe) {
  const std::vector<Point> points = points_of(measurements, device, recipe);
  const auto clock = settled_mhz(measurements, device, recipe);
  if (points.empty() || !clock) return std::nullopt;
  const DeviceClass& hardware = measurements.table.devices[device];
  const auto roofs = roofs_of(hardware, *clock);
  Figure figure{
      .kind = "roofline",
      .device = measurements.device_label(device),
      .recipe = recipe,
      .title = f8::format("Roofline of {}", recipe),
      .description = {},
      .width = kPlotWidth,
      .height = 330,
      .table = {.caption = f8::format("GEMMs of {} on the roofline", recipe),
                .columns = {"GEMM", "N", "K", "M", "fp8 FLOP/byte", "TFLOP/s", "% of the roof",
                            "SM MHz", "bf16 FLOP/byte", "TFLOP/s", "% of the roof", "SM MHz"},
                .rows = {},
                .heads = 4}};
  double x_hi = 100, y_lo = 1e9, y_hi = roofs ? roofs->fp8_flops / 1e12 : 1;
  double x_lo = roofs ? roofs->bf16_flops / roofs->bytes / 2 : 1e9;
  for (const Point& p : points) {
    x_lo = std::min(x_lo, p.intensity);
    x_hi = std::max(x_hi, p.intensity);
    y_lo = std::min(y_lo, p.tflops);
    y_hi = std::max(y_hi, p.tflops);
  }
  const Axis x(x_lo, x_hi, true, 62, kRight);
  const Axis y(y_lo / 1.5, y_hi * 1.2, true, 262, 10);
  Drawing drawing;
  draw_frame(drawing, x, y, {.x = "FLOP per byte of operands and result", .y = "TFLOP/s"});
  if (roofs) {
    draw_roof(drawing, x, y, roofs->fp8_flops, roofs->bytes, "series0",
              f8::format("fp8 {:.0f}", roofs->fp8_flops / 1e12));
    draw_roof(drawing, x, y, roofs->bf16_flops, roofs->bytes, "series1",
              f8::format("bf16 {:.0f}", roofs->bf16_flops / 1e12));
  }
  for (const Point& p : points) {
    drawing.marker(p.bf16 ? Drawing::Marker::kSquare : Drawing::Marker::kCircle, x.at(p.intensity),
                   y.at(p.tflops), p.bf16 ? "series1" : "series0");
  }
  figure.table.rows = numbers_of(points, roofs);
  drawing.marker(Drawing::Marker::kCircle, 70, 318, "series0");
  drawing.text(80, 322, "fp8, fastest kernel of a GEMM", Drawing::Anchor::kStart, "small");
  drawing.marker(Drawing::Marker::kSquare, 270, 318, "series1");
  drawing.text(280, 322, "bf16, cuBLASLt", Drawing::Anchor::kStart, "small");
  figure.body = drawing.body();
  figure.description =
      f8::format("Each GEMM's rate over its arithmetic intensity, on {}. {}", figure.device,
                 words_on_roofs(points, roofs, *clock, hardware.sm_clock_max_mhz));
  return figure;
}

std::optional<Figure> time_by_part(const Measurements& measurements, size_t device,
                                   const std::string& recipe, int64_t m) {
  const auto linears = linears_of(measurements, device, recipe, m);
  if (linears.empty()) return std::nullopt;
  Figure figure{.kind = "time",
                .device = measurements.device_label(device),
                .recipe = recipe,
                .m = m,
                .title = f8::format("A linear's time at M {}: {}", m, recipe),
                .description = {},
                .width = kPlotWidth,
                .table = {.caption = f8::format("Time by part, M {}, recipe {}", m, recipe),
                          .columns = {"N", "K", "type", "us"},
                          .rows = {},
                          .heads = 3}};
  for (const auto& part : kParts) figure.table.columns.push_back(f8::format("{} us", part.name));
  figure.table.columns.emplace_back("amax, casts and gaps, share");
  double most = 100;
  std::vector<double> rests;
  for (const LinearTimes* linear : linears) {
    most = std::max(most, 100 * linear->fp8.ns / linear->bf16.ns);
    rests.push_back(std::max(0.0, *linear->fp8.rest_ns()) / linear->fp8.ns);
  }
  const double bottom = 24 + 40.0 * static_cast<double>(linears.size());
  const Axis x(0, most, false, 112, kRight);
  Drawing drawing;
  for (const double tick : x.ticks()) {
    drawing.line(x.at(tick), 8, x.at(tick), bottom, "grid");
    drawing.text(x.at(tick), bottom + 17, f8::format("{:g} %", tick), Drawing::Anchor::kMiddle);
  }
  double top = 16;
  for (const LinearTimes* linear : linears) {
    drawing.text(106, top + 12, f8::format("{} x {}", linear->shape.n, linear->shape.k),
                 Drawing::Anchor::kEnd);
    drawing.text(
        106, top + 28,
        f8::format("{} : {} us", microseconds(linear->fp8.ns), microseconds(linear->bf16.ns)),
        Drawing::Anchor::kEnd, "small");
    const bool is_first = linear == linears.front();  // the others' parts are in the same order
    draw_bar(drawing, x, top, linear->fp8, linear->bf16.ns, is_first);
    draw_bar(drawing, x, top + 16, linear->bf16, linear->bf16.ns, is_first);
    figure.table.rows.push_back(numbers_of(linear->shape, "float8", linear->fp8));
    figure.table.rows.push_back(numbers_of(linear->shape, "bf16", linear->bf16));
    top += 40;
  }
  drawing.text((112 + kRight) / 2, bottom + 36, "of the bf16 linear's time",
               Drawing::Anchor::kMiddle);
  draw_part_legend(drawing, bottom + 48);
  figure.height = bottom + 92;
  figure.body = drawing.body();
  figure.description = f8::format(
      "N x K, and the times in float8 : bf16. The upper bar is float8, the lower one bf16. Amax, "
      "casts "
      "and gaps are {} of a float8 linear in the median, on {}.",
      percent(tuner::median(rests)), figure.device);
  return figure;
}

std::optional<Figure> generated_against_library(const Measurements& measurements, size_t device,
                                                const std::string& recipe, int64_t m) {
  struct Row {
    int64_t n, k;
    std::array<const GemmTimes*, 3> gemms{};
  };
  std::vector<Row> rows;
  std::vector<double> logs;
  size_t at_least = 0;
  for (const GemmTimes& times : measurements.gemms) {
    const Shape s = times.problem.shape();
    if (times.device != device || times.problem.recipe != recipe || s.m != m) continue;
    if (!times.generated || !times.library) continue;
    const auto known =
        std::ranges::find_if(rows, [s](const Row& row) { return row.n == s.n && row.k == s.k; });
    Row& row = known != rows.end() ? *known : rows.emplace_back(Row{s.n, s.k, {}});
    const GemmTimes*& gemm = row.gemms[static_cast<size_t>(times.problem.op)];
    if (gemm != nullptr) continue;  // with a bias too
    gemm = &times;
    logs.push_back(std::log(times.library->ns / times.generated->ns));
    at_least += times.generated->ns <= times.library->ns ? 1 : 0;
  }
  if (rows.empty()) return std::nullopt;
  std::ranges::stable_sort(rows, std::greater{}, [](const Row& row) { return row.n * row.k; });
  const bool is_cut = rows.size() > kMaxLinears;
  rows.resize(std::min(rows.size(), kMaxLinears));
  Figure figure{.kind = "library",
                .device = measurements.device_label(device),
                .recipe = recipe,
                .m = m,
                .title = f8::format("Generated against cuBLASLt at M {}: {}", m, recipe),
                .description = {},
                .table = {.caption = f8::format("Fastest kernels, M {}, recipe {}", m, recipe),
                          .columns = {"N", "K", "GEMM", "generated us", "kernel", "cuBLASLt us",
                                      "suggestion", "ratio"},
                          .rows = {},
                          .heads = 3}};
  Grid grid{.rows = {},
            .columns = {"y", "dx", "dw"},
            .cells = {},
            .row_label = "N x K",
            .column_label = "y: output, dx: grad_input, dw: grad_weight"};
  grid.row_label.clear();
  for (const Row& row : rows) {
    grid.rows.push_back(f8::format("{}×{}", row.n, row.k));
    std::vector<Cell>& cells = grid.cells.emplace_back();
    for (const GemmTimes* gemm : row.gemms) {
      if (gemm == nullptr) {
        cells.emplace_back();
        continue;
      }
      const double ratio = gemm->library->ns / gemm->generated->ns;
      cells.push_back({ratio, f8::format("{:.2f}", ratio)});
      figure.table.rows.push_back({f8::format("{}", row.n), f8::format("{}", row.k),
                                   std::string(to_string(gemm->problem.op)),
                                   microseconds(gemm->generated->ns), config_of(*gemm->generated),
                                   microseconds(gemm->library->ns), config_of(*gemm->library),
                                   f8::format("{:.3f}", ratio)});
    }
  }
  draw_grid(figure, grid, {});
  figure.description = f8::format(
      "cuBLASLt's fastest suggestion over the fastest generated kernel, on {}: above 1 the "
      "generated "
      "one is faster. It is at least as fast in {} of {} GEMMs; the geometric mean is {:.3f}. A "
      "cell is "
      "empty where not both have a time within the target interval.{}",
      figure.device, at_least, logs.size(), std::exp(tuner::mean(logs)),
      is_cut ? " Only the largest layers are shown." : "");
  return figure;
}

}  // namespace f8::report
