// The console's calls to the server: requests with the key, event streams, and readable errors.
// The key is kept in this tab's sessionStorage and nowhere else.

const KEY = "penstock-key";
const TIMEOUT_MS = 5000;

// What went wrong, for people; `code` and `status` for the program.
export class Problem extends Error {
  constructor(words, { code = "", status = 0, said = "" } = {}) {
    super(words);
    this.code = code;
    this.status = status;
    this.said = said; // the server's own message
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

const WORDS_OF_CODE = {
  invalid_api_key: "This server wants an API key, and did not get a valid one. Enter it in Settings.",
  api_key_expired: "The API key has expired. Enter another in Settings.",
  api_key_revoked: "The API key was revoked. Enter another in Settings.",
  permission_denied: "The API key does not permit this.",
  rate_limit_exceeded: "The key's tenant has used its quota. Try again later.",
  context_length_exceeded: "The conversation is too long for this model. Clear it, or ask for fewer tokens.",
  request_too_large: "The message is too large.",
  model_not_found: "This model is not served here.",
  overloaded: "The server has too much to do. Try again in a moment.",
  no_worker: "No worker is ready to answer. Try again in a moment.",
  worker_lost: "The worker that answered has gone. Try again.",
  deadline_exceeded: "The answer took too long.",
  numerical_error: "The model gave no usable numbers.",
  chat_template_missing: "This model has no chat template, so it cannot chat.",
  chat_template_error: "The model's chat template refused this conversation.",
};

const wordsOf = (code, status) => {
  if (WORDS_OF_CODE[code]) return WORDS_OF_CODE[code];
  if (status >= 500) return "The server failed.";
  return "The server refused this.";
};

const problemOf = (error, status) => {
  const { code = "", message = "" } = error || {};
  return new Problem(wordsOf(code, status), { code, status, said: message });
};

// Paths are relative to the page, so that the console also works under a path prefix.
const call = async (path, options = {}) => {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = "Bearer " + key.get();
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw problemOf(body.error, answer.status);
};

export const getJson = async (path) => {
  const answer = await call(path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  return answer.json();
};

// The data of each event in a stream of server-sent events.
const eventsOf = async function* (answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
  }
};

// The chunks of a chat answer. Throws Problem, also where a stream ends before its end.
export const streamChat = async function* (body, signal) {
  const answer = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  try {
    for await (const data of eventsOf(answer)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw problemOf(chunk.error, 500);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    throw new Problem("The connection broke before the end of the answer.");
  }
  throw new Problem("The connection broke before the end of the answer.");
};
