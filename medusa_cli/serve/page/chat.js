"use strict";
// The conversation: what was said, what is being written, and the panel beside it.

const $ = (id) => document.getElementById(id);
const KEY = "medusa-api-key"; // in the tab's own storage, and nowhere else
const chat = { messages: [], writing: null, shown: null, chosen: -1, follows: true, isPinned: false };

// --- turns ---

function turn(kind, name) {
  const article = document.createElement("article");
  article.className = `turn ${kind}`;
  const who = document.createElement("h3");
  who.textContent = name;
  const words = document.createElement("div");
  words.className = "words";
  article.append(who, words);
  $("welcome").hidden = true;
  $("log").append(article);
  return { article, words };
}

function note(article, text, retry) {
  const element = document.createElement("p");
  element.className = retry ? "fault" : "note";
  element.textContent = text;
  if (retry) {
    element.setAttribute("role", "alert");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = "Try again";
    button.addEventListener("click", retry);
    element.append(" ", button);
  }
  article.append(element);
}

function toEnd() {
  const log = $("log");
  if (chat.follows) log.scrollTop = log.scrollHeight;
}

function requestOf(messages) {
  const system = $("system").value.trim();
  const request = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: $("temperature").valueAsNumber,
    max_tokens: $("max-tokens").valueAsNumber,
    speculate: $("speculate").checked,
    stream: true,
    stream_options: { include_usage: true, include_steps: true },
  };
  if ($("seed").value !== "") request.seed = $("seed").valueAsNumber;
  return request;
}

function areFieldsRight() {
  if ($("fields").checkValidity()) return true;
  $("settings").open = true;
  $("fields").reportValidity();
  return false;
}

async function say(text) {
  chat.messages.push({ role: "user", content: text });
  turn("user", "You").words.textContent = text;
  chat.follows = true;
  await answer();
}

async function answer() {
  const { article, words } = turn("reply", "Model");
  const reply = new Reply(words, pin);
  chat.isPinned = false;
  const stopping = new AbortController();
  article.classList.add("writing");
  chat.writing = { stopping, reply };
  showLast(reply);
  setWriting(true);
  try {
    for await (const chunk of chunksOf(requestOf(chat.messages), $("key").value.trim(), stopping.signal)) {
      reply.add(chunk);
      showLast(reply);
      toEnd();
    }
    setState("ready");
    if (reply.finish === "length") note(article, "It ended at the most tokens that were asked for, or where the context is full.");
    if (!reply.content) note(article, "The model ended its turn without a word.");
    announce(`The model said: ${reply.content}`);
  } catch (error) {
    if (error.name === "AbortError") ended(article, "Stopped.");
    else failed(article, reply, error);
  } finally {
    article.classList.remove("writing");
    if (reply.content && chat.writing && chat.writing.reply === reply) chat.messages.push({ role: "assistant", content: reply.content });
    if (chat.writing && chat.writing.reply === reply) {
      chat.writing = null;
      setWriting(false);
    }
    toEnd();
  }
}

function ended(article, words) {
  note(article, words);
  announce(words);
}

function failed(article, reply, error) {
  const words = error instanceof Told ? error.message : "The page failed to read the answer.";
  if (!(error instanceof Told)) console.error(error);
  if (error.status === 401) {
    $("settings").open = true;
    $("key").focus();
  }
  if (error.status === 0) checkModel();
  // what was said before it broke is thrown away when it is tried again
  note(article, words, () => {
    if (chat.writing) return;
    if (chat.messages.at(-1).role === "assistant") chat.messages.pop();
    article.remove();
    answer();
  });
  for (const older of document.querySelectorAll(".fault button")) older.hidden = !article.contains(older);
}

function setWriting(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (is) {
    announce("Writing.");
    for (const button of document.querySelectorAll(".fault button")) button.hidden = true;
  } else if (document.activeElement === document.body || document.activeElement === $("stop")) {
    $("prompt").focus();
  }
}

function announce(words) {
  $("said").textContent = words;
}

// --- the panel ---

// While a reply grows its last step that guessed is shown, unless somebody looks at another.
function showLast(reply) {
  const { rate, perStep, steps, drafted, kept } = reply.figures;
  $("rate").textContent = rate === null ? "–" : rate.toFixed(1);
  $("per-step").textContent = perStep === null ? "–" : perStep.toFixed(2);
  $("num-steps").textContent = steps || "–";
  $("kept").textContent = drafted ? `${kept} of ${drafted}` : steps ? "none made" : "–";
  if (chat.isPinned) return;
  const last = reply.steps.findLastIndex((step) => step.tree);
  choose(reply, last >= 0 ? last : reply.steps.length - 1);
}

function choose(reply, index) {
  chat.shown?.spans[chat.chosen]?.classList.remove("chosen");
  [chat.shown, chat.chosen] = [reply, index];
  const step = reply.steps[index];
  $("earlier").disabled = index <= 0;
  $("later").disabled = index >= reply.steps.length - 1;
  $("tree").replaceChildren();
  if (!step) {
    $("step-number").textContent = "no step yet";
    return;
  }
  reply.spans[index].classList.add("chosen");
  $("step-number").textContent = index === 0 ? "the prompt’s reading" : `step ${index} of ${reply.steps.length - 1}`;
  $("tree-words").textContent = step.tree ? wordsOf(step) : "Nothing was guessed here: one token of the model’s own.";
  if (step.tree) $("tree").append(drawingOf(step, reply.endsWith(index), $("step").clientWidth));
}

function pin(reply, index) {
  chat.isPinned = true;
  choose(reply, index);
}

function go(by) {
  const index = chat.chosen + by;
  if (chat.shown && chat.shown.steps[index]) pin(chat.shown, index);
}

// --- the server ---

function setState(kind, words) {
  $("state").className = `state ${kind}`;
  if (words) $("model-name").textContent = words;
}

async function checkModel() {
  clearTimeout(checkModel.timer);
  try {
    const model = await modelOf($("key").value.trim());
    setState("ready", model.id);
    document.title = `${model.id} · medusa`;
  } catch (error) {
    const told = { 401: "a key is asked for", 503: "the model is being loaded" };
    setState(error.status === 401 ? "closed" : "waiting", told[error.status] || "not reachable");
    if (error.status === 401) $("settings").open = true;
    else checkModel.timer = setTimeout(checkModel, 2000);
  }
}

// --- keys and clicks ---

function send() {
  const text = $("prompt").value;
  if (chat.writing || !text.trim() || !areFieldsRight()) return;
  $("prompt").value = "";
  fit();
  say(text.trim());
}

function fit() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, innerHeight * 0.4)}px`;
}

function stop() {
  chat.writing?.stopping.abort();
}

function anew() {
  const writing = chat.writing;
  chat.writing = null;
  writing?.stopping.abort();
  setWriting(false);
  chat.messages = [];
  for (const article of [...$("log").querySelectorAll("article")]) article.remove();
  $("welcome").hidden = false;
  chat.isPinned = false;
  showLast(new Reply(document.createElement("div"), pin));
  $("tree-words").textContent = "The guesses of each step are drawn here. Those that were right are kept.";
  announce("A new chat.");
  $("prompt").focus();
}

function listen() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("fields").addEventListener("submit", (event) => event.preventDefault());
  $("prompt").addEventListener("input", fit);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.writing) { event.preventDefault(); stop(); }
  });
  $("tree").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); go(by); }
  });
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", anew);
  $("earlier").addEventListener("click", () => go(-1));
  $("later").addEventListener("click", () => go(1));
  $("show-steps").addEventListener("change", () => document.body.classList.toggle("plain", !$("show-steps").checked));
  $("key").addEventListener("change", () => {
    sessionStorage.setItem(KEY, $("key").value.trim());
    checkModel();
  });
  const again = () => chat.shown && choose(chat.shown, chat.chosen);
  addEventListener("resize", again);
  $("step").addEventListener("toggle", again);
  $("log").addEventListener("scroll", () => {
    const log = $("log");
    chat.follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  });
}

$("key").value = sessionStorage.getItem(KEY) || "";
$("step").open = matchMedia("(min-width: 60rem)").matches;
listen();
checkModel();
