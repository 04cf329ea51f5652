// Whole models, from a file of `write_models.py`.
#include <fstream>
#include <map>

#include "check.h"
#include "decoder.cpp"

namespace outrider::test {

// The file has numbers and memory of the process that wrote it. Pointers in that memory are addresses of that process.
class File {
 public:
  explicit File(const char* path) : stream_(path, std::ios::binary) {}

  int32_t number() {
    int32_t out = 0;
    stream_.read(reinterpret_cast<char*>(&out), sizeof out);
    return stream_ ? out : 0;
  }

  std::string text() {
    std::string out(number(), ' ');
    stream_.read(out.data(), out.size());
    return out;
  }

  template <class T>
  std::vector<T> numbers() {
    std::vector<T> out(number());
    stream_.read(reinterpret_cast<char*>(out.data()), sizeof(T) * out.size());
    return out;
  }

  // Read the next parts of memory.
  void read_memory() {
    for (int parts = number(); parts; parts--) {
      uint64_t address = 0;
      stream_.read(reinterpret_cast<char*>(&address), sizeof address);
      memory_[address] = numbers<char>();
    }
  }

  // Replace an address of the process that wrote the file.
  template <class T>
  T* move(const T*& pointer) {
    const auto part = memory_.find(uint64_t(reinterpret_cast<uintptr_t>(pointer)));
    if (pointer) check(part != memory_.end(), "the file has all memory of the model");
    pointer = pointer && part != memory_.end() ? reinterpret_cast<const T*>(part->second.data()) : nullptr;
    return const_cast<T*>(pointer);
  }

 private:
  std::ifstream stream_;
  std::map<uint64_t, std::vector<char>> memory_;
};

inline void move(File& file, Linear& layer) {
  file.move(layer.weight);
  file.move(layer.scale);
  file.move(layer.minimum);
  file.move(layer.sub_scale);
  file.move(layer.sub_minimum);
  file.move(layer.zero);
  file.move(layer.order);
  file.move(layer.bias);
}

inline void move(File& file, Layer& layer) {
  for (Linear* each : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down, &layer.value, &layer.router}) move(file, *each);
  file.move(layer.attention_norm);
  file.move(layer.mlp_norm);
  file.move(layer.attention_post_norm);
  file.move(layer.mlp_post_norm);
  file.move(layer.query_norm);
  file.move(layer.key_norm);
}

inline void move(File& file, Model& model) {
  Layer* layers = file.move(model.layer);
  for (int i = 0; layers && i < model.layers; i++) move(file, layers[i]);
  file.move(model.embedding);
  file.move(model.norm);
  file.move(model.frequency);
  file.move(model.rotary_scale);
  move(file, model.head);
  move(file, model.table);
}

// A model with memory for one sequence.
class Running {
 public:
  Running(Model model, int threads, int bits) {
    table_.resize(kReach);
    for (int i = 0; i < kReach; i++) table_[i] = kReach - 1 - i;
    entries_.resize(size_t(kReach) * model.layers * model.key_heads * 2 * kBlock * model.dim * bits / 8);
    pool_ = {entries_.data(), table_.data(), nullptr, model.layers, kReach, bits};
    vocab_ = model.head.outputs;
    model.pool = &pool_;
    model.threads = threads;
    decoder_ = outrider_open(&model);
  }
  ~Running() { outrider_close(decoder_); }

  // Return the logits [tokens][vocab] of tokens after the first `begin` ones.
  std::vector<float> run(const std::vector<int32_t>& tokens, int begin) {
    const int count = int(tokens.size());
    std::vector<int32_t> place, slot(count), prefix, tail_begin(count + 1), columns, best(count);
    for (int i = 0; i < count; i++) {
      place.push_back(begin + i);
      prefix.push_back(begin + i + 1);
      columns.push_back(i);
    }
    std::vector<float> logits(size_t(count) * vocab_);
    const Pass pass{tokens.data(),     place.data(),   slot.data(),   place.data(), prefix.data(),
                    tail_begin.data(), nullptr,        columns.data(), logits.data(), best.data(),
                    nullptr,           nullptr,        nullptr,       0,            count,
                    count,             0};
    outrider_run(decoder_, &pass);
    return logits;
  }

 private:
  static constexpr int kReach = 2;  // blocks of the sequence
  std::vector<int32_t> table_;
  std::vector<char> entries_;
  Pool pool_{};
  int vocab_;
  void* decoder_;
};

// The overlap of the probabilities of two rows of logits: 1 if they are equal.
inline double overlap(const float* a, const float* b, int vocab) {
  const auto mass = [&](const float* logits) {
    double sum = 0;
    for (int i = 0; i < vocab; i++) sum += std::exp(double(logits[i]));
    return sum;
  };
  const double mass_a = mass(a), mass_b = mass(b);
  double out = 0;
  for (int i = 0; i < vocab; i++) out += std::min(std::exp(double(a[i])) / mass_a, std::exp(double(b[i])) / mass_b);
  return out;
}

// Check the next model of a file.
inline void check_model(File& file) {
  const std::string name = file.text();
  const int bits = file.number();  // of an element of the cache
  file.read_memory();
  Model model{};
  const std::vector<char> bytes = file.numbers<char>();
  check(bytes.size() == sizeof model, name + ": size");
  std::memcpy(&model, bytes.data(), std::min(bytes.size(), sizeof model));
  move(file, model);
  const auto tokens = file.numbers<int32_t>();
  const auto right = file.numbers<float>();
  const int vocab = model.head.outputs;
  const auto logits = Running(model, 1, bits).run(tokens, 0);
  check(right.size() == logits.size(), name + ": logits");
  double least = 1;
  for (size_t at = 0; at + vocab <= std::min(right.size(), logits.size()); at += vocab)
    least = std::min(least, overlap(&right[at], &logits[at], vocab));
  check(least > (bits == 32 ? 0.9999 : 0.98), name + ": probabilities");
  std::printf("%s: probabilities overlap by %.5f or more\n", name.c_str(), least);
  for (const int threads : {1, 3}) {
    Running one_by_one(model, threads, bits);
    for (size_t begin = 0; begin < tokens.size();) {
      const size_t count = std::min(tokens.size() - begin, begin < 4 ? 1 + begin : 5 + begin % 3);
      const auto part = one_by_one.run({tokens.begin() + begin, tokens.begin() + begin + count}, int(begin));
      check(same_bits(part.data(), &logits[begin * vocab], part.size()), name + ": bits of a shorter pass");
      begin += count;
    }
  }
}

void check_models(const char* path) {
  File file(path);
  const int count = file.number();
  check(count > 0, std::string(path) + " has models");
  for (int i = 0; i < count; i++) check_model(file);
}

}  // namespace outrider::test
