"use strict";
// The server: a chat as a stream of chunks, and what goes wrong in words.

class Told extends Error {
  // message: for people; status: HTTP's, or 0 where no answer came
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const WORDS_OF_STATUS = {
  401: "The server asks for an API key. Enter it under Settings.",
  408: "The answer took too long.",
  413: "The conversation has grown too large for one request. Begin a new chat.",
  429: "The server is busy: as many texts wait as may. Try again in a moment.",
  503: "The server isn’t ready: it loads the model, or is about to end.",
};

function headersOf(key) {
  return key ? { "Authorization": `Bearer ${key}` } : {};
}

async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /header|ISO-8859-1|ByteString/i.test(error.message)) {
      throw new Told("The API key holds characters that no key can have.", 401);
    }
    throw new Told("The server can’t be reached.");
  }
  if (!answer.ok) throw await faultOf(answer);
  return answer;
}

async function faultOf(answer) {
  let said = "";
  try {
    said = (await answer.json()).error.message;
  } catch {
    // no error object: the status has to do
  }
  const words = WORDS_OF_STATUS[answer.status];
  if (answer.status === 503 && said) return new Told(sentence(said), 503);
  return new Told(words || (said ? sentence(said) : `The server answered with status ${answer.status}.`), answer.status);
}

function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

async function modelOf(key) {
  const document = await (await asked("v1/models", { headers: headersOf(key) })).json();
  return document.data[0];
}

// Each chunk of an answer. Throws Told, also where the stream ends before it says so, and AbortError.
async function* chunksOf(request, key, signal) {
  const answer = await asked("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headersOf(key) },
    body: JSON.stringify(request),
    signal,
  });
  for await (const data of eventsOf(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Told(sentence(chunk.error.message), 500);
    yield chunk;
  }
  throw new Told("The answer broke off.");
}

async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += decoder.decode(value, { stream: true });
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Told("The connection broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
