// Runs a fuzz target without a fuzzer: every file of the corpus, then changed
// copies of them. Everything follows from a fixed seed, so a failure repeats.
//
//   x_fuzz [--runs=N] [--only=I] [--expect-failure] FILE-OR-FOLDER...
//
// A crash prints the number of the run; --only repeats just that one.
// --expect-failure turns the verdict around, for the canary.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Sanitizers then raise SIGABRT, which reports the run.
extern "C" const char* __asan_default_options();  // NOLINT: fixed name

extern "C" const char* __asan_default_options() {  // NOLINT: fixed name
  return "abort_on_error=1:handle_abort=0";
}

extern "C" const char* __ubsan_default_options();  // NOLINT: fixed name

extern "C" const char* __ubsan_default_options() {  // NOLINT: fixed name
  return "abort_on_error=1:print_stacktrace=1";
}

namespace {

constexpr size_t kInputBytesMax = 1 << 16;
constexpr uint64_t kSeed = 20260815;

// Written by the loop, read by the signal handler.
volatile sig_atomic_t g_run = 0;

void ReportRun(int signal) {
  char text[64] = "\nrun ";
  size_t at = 5;
  char digits[16];
  size_t count = 0;
  int run = g_run;
  do {
    digits[count++] = static_cast<char>('0' + run % 10);
    run /= 10;
  } while (run > 0);
  while (count > 0) text[at++] = digits[--count];
  for (const char c : {' ', 'f', 'a', 'i', 'l', 'e', 'd', '\n'}) text[at++] = c;
  static_cast<void>(!write(STDERR_FILENO, text, at));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

std::string ReadBytes(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return std::string(std::istreambuf_iterator<char>(in),
                     std::istreambuf_iterator<char>());
}

// Files in the order of their names, so that runs repeat on every machine.
std::vector<std::string> ReadCorpus(const std::vector<std::string>& places) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& place : places) {
    if (std::filesystem::is_directory(place)) {
      for (const auto& entry : std::filesystem::directory_iterator(place)) {
        if (entry.is_regular_file()) paths.push_back(entry.path());
      }
    } else {
      paths.emplace_back(place);
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const auto& path : paths) corpus.push_back(ReadBytes(path));
  return corpus;
}

// Bits of text that parsers treat specially.
const char* const kTokens[] = {"0",
                               "-1",
                               "1e999",
                               "18446744073709551616",
                               "-9223372036854775809",
                               "\"",
                               "\\",
                               "\\u0000",
                               "null",
                               "true",
                               "{",
                               "}",
                               "[",
                               "]",
                               ":",
                               ",",
                               "\n",
                               "{}",
                               "[]",
                               "0.5",
                               "\xEF\xBB\xBF",
                               "\xFF",
                               "T",
                               "{",
                               "128",
                               "4294967296"};

class Mutator {
 public:
  explicit Mutator(const std::vector<std::string>& corpus) : corpus_(corpus) {}

  // The input of run `run`; depends on nothing else.
  std::string Input(uint64_t run) {
    random_.seed(kSeed + run);
    std::string input = corpus_[Below(corpus_.size())];
    const size_t changes = 1 + Below(8);
    for (size_t i = 0; i < changes; ++i) Change(&input);
    if (input.size() > kInputBytesMax) input.resize(kInputBytesMax);
    return input;
  }

 private:
  size_t Below(size_t limit) {
    return limit == 0 ? 0 : static_cast<size_t>(random_() % limit);
  }

  void Change(std::string* input) {
    const size_t at = Below(input->size() + 1);
    const size_t rest = input->size() - at;
    switch (Below(8)) {
      case 0:  // flip a bit
        if (rest > 0) (*input)[at] ^= static_cast<char>(1u << Below(8));
        break;
      case 1:  // another byte
        if (rest > 0) (*input)[at] = static_cast<char>(Below(256));
        break;
      case 2:  // drop a piece
        input->erase(at, Below(std::min<size_t>(rest, 64) + 1));
        break;
      case 3:  // repeat a piece
        input->insert(
            Below(input->size() + 1),
            input->substr(at, Below(std::min<size_t>(rest, 256) + 1)));
        break;
      case 4:  // a special token, put in or over
        if (Below(2) == 0) {
          input->insert(at, kTokens[Below(std::size(kTokens))]);
        } else {
          const std::string token = kTokens[Below(std::size(kTokens))];
          input->replace(at, std::min(rest, token.size()), token);
        }
        break;
      case 5:  // cut off
        if (Below(4) == 0) input->resize(at);
        break;
      case 6: {  // a piece of another file
        const std::string& other = corpus_[Below(corpus_.size())];
        const size_t from = Below(other.size() + 1);
        input->insert(at, other.substr(from, Below(256)));
        break;
      }
      default:  // another digit
        for (size_t i = at; i < input->size(); ++i) {
          char& c = (*input)[i];
          if (c < '0' || c > '9') continue;
          c = static_cast<char>('0' + Below(10));
          break;
        }
        break;
    }
  }

  const std::vector<std::string>& corpus_;
  std::mt19937_64 random_;
};

void RunOne(const std::string& input) {
  // A copy of exactly this size, so that a sanitizer sees reads past the end.
  std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

int RunAll(const std::vector<std::string>& corpus, int runs, int only) {
  for (const int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGILL}) {
    std::signal(signal, ReportRun);
  }
  Mutator mutator(corpus);
  if (only > 0) {
    g_run = only;
    RunOne(mutator.Input(static_cast<uint64_t>(only)));
    return 0;
  }
  for (const std::string& input : corpus) RunOne(input);
  for (int run = 1; run <= runs; ++run) {
    g_run = run;
    RunOne(mutator.Input(static_cast<uint64_t>(run)));
  }
  std::printf("%zu files and %d changed ones passed\n", corpus.size(), runs);
  return 0;
}

// Runs in a child: 0 when it crashed, as the canary must.
int ExpectFailure(const std::vector<std::string>& corpus, int runs) {
  const pid_t child = fork();
  if (child < 0) {
    std::perror("fork");
    return 2;
  }
  if (child == 0) std::_Exit(RunAll(corpus, runs, 0));
  int status = 0;
  if (waitpid(child, &status, 0) != child) {
    std::perror("waitpid");
    return 2;
  }
  if (WIFSIGNALED(status)) {
    std::printf("the defect was found, as it must be\n");
    return 0;
  }
  std::fprintf(stderr, "the defect was not found: this fuzz loop is blind\n");
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  int runs = 20000;
  int only = 0;
  bool expect_failure = false;
  std::vector<std::string> places;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--runs=", 0) == 0) {
      runs = std::atoi(argument.c_str() + 7);
    } else if (argument.rfind("--only=", 0) == 0) {
      only = std::atoi(argument.c_str() + 7);
    } else if (argument == "--expect-failure") {
      expect_failure = true;
    } else {
      places.push_back(argument);
    }
  }
  const std::vector<std::string> corpus = ReadCorpus(places);
  if (corpus.empty() || runs < 1) {
    std::fprintf(stderr, "usage: %s [--runs=N] [--only=I] FILE-OR-FOLDER...\n",
                 argv[0]);
    return 2;
  }
  return expect_failure ? ExpectFailure(corpus, runs)
                        : RunAll(corpus, runs, only);
}
