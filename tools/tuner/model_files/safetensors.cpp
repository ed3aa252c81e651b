#include "tools/tuner/model_files/safetensors.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "base/file.hpp"
#include "base/text.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::tuner {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit

Result<uint64_t> header_length(std::string_view prefix, uint64_t file_size,
                               std::string_view where) {
  if (prefix.size() < 8) {
    return fail(ErrorCode::kCorrupt,
                "{} is not a safetensors file: it has {} bytes, fewer than the 8 of its length; "
                "download it again",
                where, prefix.size());
  }
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) {
    length |= static_cast<uint64_t>(static_cast<unsigned char>(prefix[i])) << (8 * i);
  }
  if (length > kMaxHeader || length < 2) {
    return fail(ErrorCode::kCorrupt,
                "{} is not a safetensors file: its header would be {} bytes long (allowed: 2 to "
                "{}); download it again",
                where, length, kMaxHeader);
  }
  if (file_size - 8 < length) {
    return fail(ErrorCode::kCorrupt,
                "{} is truncated: its header is {} bytes long, the file has {} after the length; "
                "download it again",
                where, length, file_size - 8);
  }
  return length;
}

// Orders "layers.2.wq" before "layers.10.wq": digit runs compare as numbers, by length and then by
// digits.
bool natural_less(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  while (!a.empty() && !b.empty()) {
    if (digit(a.front()) && digit(b.front())) {
      const auto run = [&](std::string_view s) {
        return static_cast<size_t>(std::ranges::find_if_not(s, digit) - s.begin());
      };
      const std::string_view x = a.substr(0, run(a));
      const std::string_view y = b.substr(0, run(b));
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
      a.remove_prefix(x.size());
      b.remove_prefix(y.size());
    } else {
      if (a.front() != b.front()) return a.front() < b.front();
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.size() < b.size();
}

bool is_linear(const TensorShape& tensor) {
  constexpr std::array<std::string_view, 5> kOthers = {"embed", "norm", "wte.", "wpe.", "lora_"};
  if (!tensor.name.ends_with(".weight") || tensor.shape.size() != 2) return false;
  return std::ranges::none_of(kOthers, [&](std::string_view other) {
    return tensor.name.find(other) != std::string::npos;
  });
}

// By the name of the layer. A bias has out_features elements, which tells the weights of GPT-2, that
// lie as [in_features, out_features], from those of all others.
std::map<std::string, int64_t> lengths_of_biases(const std::vector<TensorShape>& tensors) {
  constexpr std::string_view kBias = ".bias";
  std::map<std::string, int64_t> lengths;
  for (const TensorShape& tensor : tensors) {
    if (!tensor.name.ends_with(kBias) || tensor.shape.size() != 1) continue;
    lengths[tensor.name.substr(0, tensor.name.size() - kBias.size())] = tensor.shape[0];
  }
  return lengths;
}

}  // namespace

Result<std::vector<TensorShape>> parse_safetensors(std::string_view bytes, std::string_view where) {
  const uint64_t length = F8_TRY(header_length(bytes.substr(0, 8), bytes.size(), where));
  const std::string what = f8::format("the header of {}", where);
  std::vector<TensorShape> tensors;
  const auto take = [&](const std::string& name, const nlohmann::json& entry) -> Status {
    if (name == "__metadata__") return {};
    if (name.size() > kLongestName) {
      return fail(ErrorCode::kCorrupt, "{}: a tensor's name has {} bytes; it has at most {}", what,
                  name.size(), kLongestName);
    }
    if (has_control(name)) {
      return fail(ErrorCode::kCorrupt,
                  "{}: the name {} of a tensor has control characters; download it again", what,
                  quote(name));
    }
    const auto shape = entry.is_object() ? entry.find("shape") : entry.end();
    if (!entry.is_object() || shape == entry.end() || !shape->is_array() ||
        !entry.contains("dtype")) {
      return fail(ErrorCode::kCorrupt, "{}: tensor {} has no dtype and shape; download it again",
                  what, quote(name));
    }
    TensorShape tensor{name, {}};
    for (const auto& extent : *shape) {
      if (!extent.is_number_unsigned() || extent.get<uint64_t>() > INT64_MAX) {
        return fail(ErrorCode::kCorrupt,
                    "{}: the shape of tensor {} is no list of sizes; download it again", what,
                    quote(name));
      }
      tensor.shape.push_back(extent.get<int64_t>());
    }
    tensors.push_back(std::move(tensor));
    return {};
  };
  F8_TRY(tuning_db::parse_json_members(bytes.substr(8, length), what, take));
  return tensors;
}

Result<std::vector<TensorShape>> read_safetensors(const fs::path& path) {
  const std::string where = path.string();
  const FileFront prefix = F8_TRY(read_front(path, 8));
  const uint64_t length = F8_TRY(header_length(prefix.bytes, prefix.file_bytes, where));
  return parse_safetensors(F8_TRY(read_front(path, 8 + length)).bytes, where);
}

Result<std::vector<NamedLinear>> linears(std::vector<TensorShape> tensors, std::string_view where) {
  std::vector<NamedLinear> out;
  const std::map<std::string, int64_t> biases = lengths_of_biases(tensors);
  for (TensorShape& tensor : tensors) {
    if (!is_linear(tensor)) continue;
    for (const int64_t extent : tensor.shape) {
      if (extent < 1 || extent > kMaxDim) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}: tensor {} has the shape [{}]; sizes from 1 to {} are possible", where,
                    quote(tensor.name), fmt::join(tensor.shape, ", "), kMaxDim);
      }
    }
    tensor.name.resize(tensor.name.size() - std::string_view(".weight").size());
    auto [n, k] = std::pair(tensor.shape[0], tensor.shape[1]);
    const auto bias = biases.find(tensor.name);
    if (bias != biases.end() && bias->second == k && bias->second != n) std::swap(n, k);
    out.push_back({std::move(tensor.name), k, n});
  }
  if (out.empty()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{} has no linear layer: no 2-D tensor whose name ends in .weight; name a file of the "
        "model, or a list of layers",
        where);
  }
  if (!std::ranges::is_sorted(out, natural_less, &NamedLinear::fqn)) {
    std::ranges::sort(out, natural_less, &NamedLinear::fqn);
  }
  return out;
}

Result<std::vector<TensorShape>> read_index(const fs::path& path, const nlohmann::json& index) {
  const std::string where = path.string();
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} has no \"weight_map\" with the shard of each tensor; download it again", where);
  }
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the shard of {} is not a file name; download it again", where,
                  quote(tensor));
    }
    const auto name = shard.get<std::string>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the shard {} is not the name of a file beside it; download it again", where,
                  quote(name));
    }
    shards[name].insert(tensor);
  }
  std::vector<TensorShape> all;
  for (auto& [shard, wanted] : shards) {
    Result<std::vector<TensorShape>> tensors = read_safetensors(path.parent_path() / shard);
    if (!tensors) {
      return fail(tensors.error().code, "a shard of {}: {}", where, tensors.error().message);
    }
    for (TensorShape& tensor : *tensors) {
      if (wanted.erase(tensor.name) == 1) all.push_back(std::move(tensor));
    }
    if (!wanted.empty()) {
      return fail(ErrorCode::kCorrupt,
                  "{} says that {} is in {}, which does not hold it; download both again", where,
                  quote(*wanted.begin()), quote(shard));
    }
  }
  return all;
}

}  // namespace f8::tuner
