#include "ranks/agreement.hpp"

#include <algorithm>

#include "error.hpp"
#include "files.hpp"

namespace train {
namespace {

constexpr size_t kSlot = 512;  // bytes of a fact, which ends in zeros

// A long text ends in a hash of all of it.
std::string shortened(const std::string& text) {
  if (text.size() < kSlot) return text;
  const std::string hash = hash_hex(text);
  return text.substr(0, kSlot - hash.size() - 2) + " " + hash;
}

std::string difference(const Fact& fact, const std::vector<std::string>& texts) {
  const auto most = std::ranges::max_element(
      texts, {}, [&](const auto& t) { return std::ranges::count(texts, t); });
  std::vector<size_t> others;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] != *most) others.push_back(rank);
  }
  std::string as_do;
  for (size_t i = 1; i < others.size(); ++i)
    as_do += (i == 1 ? "" : ", ") + std::to_string(others[i]);
  if (!as_do.empty()) as_do = format(" (as do ranks %s)", as_do.c_str());
  return format("rank %zu differs%s in %s: it has %s, and rank %td has %s; %s", others.front(),
                as_do.c_str(), fact.topic.c_str(), texts[others.front()].c_str(),
                most - texts.begin(), most->c_str(), fact.remedy.c_str());
}

}  // namespace

Agreement::Agreement(Backend& backend, const Rank& world, size_t count)
    : backend_(backend), world_(world), count_(count) {
  if (world_.is_alone()) return;
  own_ = backend_.allocate(count * kSlot);
  all_ = backend_.allocate(count * kSlot * static_cast<size_t>(world_.count));
}

void Agreement::compare(const std::vector<Fact>& facts) const {
  if (world_.is_alone()) return;
  if (facts.size() != count_) fail(FLOAT8_INTERNAL, "%zu facts, not %zu", facts.size(), count_);
  std::string own;
  for (const Fact& fact : facts) {
    own += shortened(fact.text);
    own.resize((own.size() + kSlot - 1) / kSlot * kSlot);
  }
  backend_.upload(own_, own.data(), own.size());
  check(world_.communicator->all_gather(own_, all_, own.size() / sizeof(float), FLOAT8_F32,
                                        backend_.stream()));
  std::string all(own.size() * static_cast<size_t>(world_.count), '\0');
  backend_.download(all.data(), all_, all.size());
  for (size_t i = 0; i < facts.size(); ++i) {
    std::vector<std::string> texts;
    for (size_t at = i * kSlot; at < all.size(); at += own.size()) {
      texts.emplace_back(all.data() + at);
    }
    const bool equal =
        std::ranges::all_of(texts, [&](const auto& t) { return t == texts.front(); });
    if (!equal) fail_on_all(FLOAT8_INVALID_ARGUMENT, "%s", difference(facts[i], texts).c_str());
  }
}

}  // namespace train
