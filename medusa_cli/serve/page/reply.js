"use strict";
// One reply as it grows: words by the step that brought them, and what it cost. Text goes in as text, never as markup.

const HUES = 6;

class Reply {
  constructor(element, onChoose) {
    this.element = element;
    this.onChoose = onChoose;
    this.content = "";
    this.steps = []; // as told: tokens, guessed, tree
    this.spans = [];
    this.covered = 0; // characters that steps have told
    this.tokens = 0;
    this.finish = null;
    this.speculation = null;
    this.began = null;
    this.ended = null;
    this.tail = document.createTextNode(""); // words whose tokens are not whole yet
    element.append(this.tail);
  }

  add(chunk) {
    const choice = chunk.choices[0];
    if (chunk.speculation) this.speculation = chunk.speculation;
    if (!choice) return;
    this.content += choice.delta.content || "";
    for (const step of choice.steps || []) this.addStep(step);
    this.finish = choice.finish_reason || this.finish;
    this.tail.data = this.content.slice(this.covered);
    this.ended = performance.now();
    if (this.began === null && this.tokens) [this.began, this.first] = [this.ended, this.tokens];
  }

  addStep(step) {
    const index = this.steps.push(step) - 1;
    const span = document.createElement("span");
    span.className = `step hue-${index % HUES}`;
    step.tokens.forEach((token, place) => {
      const isGuess = place < step.guessed;
      const part = document.createElement("span");
      part.className = isGuess ? "guess" : "own";
      part.textContent = token.text;
      if (token.text) span.append(part);
      this.covered += token.text.length;
    });
    span.title = index === 0 ? "read with the prompt" : `step ${index}: ${counted(step.guessed, "guess", "guesses")} kept`;
    span.addEventListener("click", () => this.onChoose(this, index));
    this.spans.push(span);
    this.tokens += step.tokens.length;
    this.tail.before(span);
  }

  // Whether the model ended its turn with this step.
  endsWith(index) {
    return this.finish === "stop" && index === this.steps.length - 1;
  }

  get figures() {
    const steps = this.speculation ? this.speculation.num_steps : Math.max(0, this.steps.length - 1);
    const drafted = this.speculation
      ? this.speculation.num_draft_tokens
      : this.steps.reduce((sum, step) => sum + (step.tree ? step.tree.ids.length - 1 : 0), 0);
    const kept = this.speculation
      ? this.speculation.num_accepted_tokens
      : this.steps.reduce((sum, step) => sum + step.guessed, 0);
    const seconds = (this.ended - this.began) / 1000;
    const since = this.tokens - this.first;
    return {
      rate: this.began !== null && seconds > 0 && since > 0 ? since / seconds : null,
      perStep: steps ? (steps + kept) / steps : null,
      steps, drafted, kept,
    };
  }
}

function counted(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}
