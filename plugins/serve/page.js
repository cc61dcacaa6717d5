"use strict";

// The playground: builds its controls from the request schema, streams one chat answer, and shows
// the probabilities and the trace of every token.

const $ = (id) => document.getElementById(id);
const KINDS = { MASK: "#8e6bbf", FORCE: "#b05a7a", BIAS: "#c07a1e", SHAPE: "#2f8f83",
  CUT: "#2d74c4", MARK: "#77803a", PICK: "#5b6472" };
const START = { temperature: { t: 0.8 }, top_k: { k: 40 }, top_p: { p: 0.9 }, min_p: { p: 0.05 },
  repetition_penalty: { penalty: 1.1 }, frequency_penalty: { penalty: 0.5 },
  presence_penalty: { penalty: 0.5 }, typical_p: { p: 0.9 }, top_n_sigma: { n: 1 },
  top_a: { a: 0.2 }, tail_free: { z: 0.95 }, dry: { multiplier: 0.8 },
  xtc: { probability: 0.5, threshold: 0.1 }, epsilon: { epsilon: 0.0003 },
  eta: { epsilon: 0.0003 }, quadratic: { factor: 0.3 }, no_repeat_ngram: { n: 3 } };
const HIDDEN = new Set(["grammar", "per_request", "vocab_padding"]);
const FLAT = ["temperature", "top_p", "top_k", "min_p"];

let schema = null;
let chain = [];      // { stage, values, isOff, key }
let tokens = [];     // of the answer: { text, logprob, top, node }
let trace = null;
let chosen = null;
let stopping = null; // AbortController of the running request
let nextKey = 0;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function fetched(path) {
  const answer = await fetch(path, { headers: headers() });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(told(body, answer.status));
  return body;
}

function told(body, status) {
  if (status === 401) return "This server needs a key: fill it in at the top right.";
  return (body.error && body.error.message) || `The server answered ${status}.`;
}

// --- start ---------------------------------------------------------------------------------------

async function begin() {
  try {
    const [models, found] = await Promise.all([fetched("v1/models"), fetched("v1/schema")]);
    schema = found;
    $("model").replaceChildren(...models.data.map((each) => make("option", {}, each.id)));
    $("model-note").textContent = `context of ${models.data[0].max_model_len} tokens`;
    $("error").textContent = "";
    fillSettings();
    fillStages();
    if (!chain.length) for (const name of ["temperature", "top_k", "top_p"]) addStage(name);
    show();
  } catch (error) {
    $("error").textContent = error.message;
  }
}

function fillSettings() {
  const presets = Object.entries(schema["x-decodekit"].presets);
  const box = $("settings");
  if (box.children.length) return;
  const choice = make("select", { id: "preset" }, make("option", { value: "" }, "none"),
    ...presets.map(([name, each]) => make("option", { value: name, title: each.title }, name)));
  box.append(make("label", {}, "preset", choice));
  for (const name of ["max_tokens", "seed", ...FLAT]) {
    const start = { max_tokens: 120, seed: 1 }[name];
    box.append(field(name, start));
  }
  const where = make("select", { id: "logprobs_mode" },
    make("option", { value: "raw" }, "before the chain"),
    make("option", { value: "final" }, "after the chain"));
  box.append(make("label", {}, "probabilities", where));
  const traced = make("input", { type: "checkbox", id: "trace", checked: true });
  box.append(make("label", { className: "line" }, traced, "trace every stage"));
  box.addEventListener("input", show);
}

function field(name, start) {
  const rule = schema.properties[name] || {};
  const input = make("input", { id: `field-${name}`, type: "number", step: "any",
    value: start === undefined ? "" : start, placeholder: "as the model says",
    title: rule.description || "" });
  for (const [own, attribute] of [["minimum", "min"], ["maximum", "max"]])
    if (rule[own] !== undefined) input.setAttribute(attribute, rule[own]);
  return make("label", { className: FLAT.includes(name) ? "flat" : "" }, name, input);
}

function fillStages() {
  const stages = schema["x-decodekit"].stages;
  const groups = Object.keys(KINDS).map((kind) => {
    const names = Object.keys(stages).filter((name) => stages[name].kind === kind &&
      !HIDDEN.has(name));
    return make("optgroup", { label: kind }, ...names.map((name) =>
      make("option", { value: name, title: stages[name].docs }, `${name} – ${stages[name].title}`)));
  });
  $("add").replaceChildren(make("option", { value: "" }, "Add a stage …"), ...groups);
}

// --- the chain -----------------------------------------------------------------------------------

function addStage(name) {
  const isPicker = schema["x-decodekit"].stages[name].kind === "PICK";
  if (isPicker) chain = chain.filter((each) => kindOf(each) !== "PICK");
  const entry = { stage: name, values: { ...(START[name] || {}) }, isOff: false, key: nextKey++ };
  const last = chain.length && kindOf(chain[chain.length - 1]) === "PICK";
  chain.splice(last ? chain.length - 1 : chain.length, 0, entry);
}

function kindOf(entry) { return schema["x-decodekit"].stages[entry.stage].kind; }

function move(from, to) {
  if (to < 0 || to >= chain.length) return;
  const [entry] = chain.splice(from, 1);
  chain.splice(to, 0, entry);
  drawChain();
  show();
}

function drawChain() {
  $("chain").replaceChildren(...chain.map((entry, place) => card(entry, place)));
}

function card(entry, place) {
  const about = schema["x-decodekit"].stages[entry.stage];
  const node = make("li", { draggable: false, title: about.docs });
  node.style.setProperty("--kind", KINDS[about.kind]);
  node.classList.toggle("off", entry.isOff);
  const handle = make("span", { className: "handle", title: "Drag" }, "⠿");
  handle.addEventListener("pointerdown", () => { node.draggable = true; });
  node.addEventListener("dragstart", (event) => {
    event.dataTransfer.setData("text/plain", String(place));
    event.dataTransfer.effectAllowed = "move";
    node.classList.add("dragged");
  });
  node.addEventListener("dragend", () => { node.draggable = false; drawChain(); });
  node.addEventListener("dragover", (event) => { event.preventDefault(); node.classList.add("over"); });
  node.addEventListener("dragleave", () => node.classList.remove("over"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    move(Number(event.dataTransfer.getData("text/plain")), place);
  });
  const runs = make("input", { type: "checkbox", checked: !entry.isOff, title: "Runs",
    oninput: (event) => { entry.isOff = !event.target.checked; drawChain(); show(); } });
  node.append(make("div", { className: "row" }, handle, runs,
    make("span", { className: "name" }, entry.stage),
    make("span", { className: "kind" }, about.kind), make("span", { style: "flex:1" }),
    make("button", { className: "bare", ariaLabel: `${entry.stage} earlier`, disabled: !place,
      onclick: () => move(place, place - 1) }, "↑"),
    make("button", { className: "bare", ariaLabel: `${entry.stage} later`,
      disabled: place === chain.length - 1, onclick: () => move(place, place + 1) }, "↓"),
    make("button", { className: "bare", ariaLabel: `remove ${entry.stage}`,
      onclick: () => { chain.splice(place, 1); drawChain(); show(); } }, "✕")));
  const inputs = parameters(entry);
  if (inputs.length) node.append(make("div", { className: "params" }, ...inputs));
  return node;
}

function parameters(entry) {
  const rules = schema.$defs[`stage.${entry.stage}`].properties;
  const defaults = schema["x-decodekit"].stages[entry.stage].defaults;
  return Object.keys(rules).filter((name) => name !== "stage" && name !== "id").map((name) =>
    make("label", { title: rules[name].description || "" }, name,
      parameter(entry, name, plainRule(rules[name]), defaults[name])));
}

// Without the null that says "not given".
function plainRule(rule) {
  const options = (rule.anyOf || []).filter((each) => each.type !== "null");
  return options.length ? { ...rule, ...options[0], isMixed: options.length > 1 } : rule;
}

function parameter(entry, name, rule, start) {
  const set = (value) => {
    if (value === undefined) delete entry.values[name];
    else entry.values[name] = value;
    show();
  };
  const now = entry.values[name];
  if (rule.enum && !rule.isMixed) {
    return make("select", { value: now ?? start ?? "", oninput: (e) => set(e.target.value) },
      ...rule.enum.map((each) => make("option", { selected: each === (now ?? start) }, each)));
  }
  if (rule.type === "boolean") {
    return make("input", { type: "checkbox", checked: now ?? start ?? false,
      oninput: (e) => set(e.target.checked) });
  }
  const isNumber = !rule.isMixed && (rule.type === "number" || rule.type === "integer");
  return make("input", { type: isNumber ? "number" : "text", step: "any",
    className: isNumber ? "" : "wide",
    value: now === undefined ? "" : (isNumber || typeof now === "string") ? now : JSON.stringify(now),
    placeholder: start === null || start === undefined ? "" : JSON.stringify(start),
    oninput: (e) => set(e.target.value === "" ? undefined : read(e.target.value)) });
}

function read(text) {
  try { return JSON.parse(text); } catch { return text; }
}

// --- the request ---------------------------------------------------------------------------------

function body() {
  const messages = [];
  if ($("system").value.trim()) messages.push({ role: "system", content: $("system").value });
  messages.push({ role: "user", content: $("prompt").value });
  const made = { model: $("model").value, messages };
  const isOwn = $("own-chain").checked;
  for (const name of ["max_tokens", "seed", ...(isOwn ? [] : FLAT)]) {
    const text = $(`field-${name}`).value;
    if (text !== "") made[name] = Number(text);
  }
  if ($("preset").value) made.preset = $("preset").value;
  if (isOwn) made.chain = chain.filter((each) => !each.isOff).map((each) =>
    ({ stage: each.stage, ...each.values }));
  Object.assign(made, { logprobs: true, top_logprobs: 8, logprobs_mode: $("logprobs_mode").value });
  if ($("trace").checked) made.trace = "tokens";
  return { ...made, stream: true, stream_options: { include_usage: true } };
}

function show() {
  if (!schema) return;
  const isOwn = $("own-chain").checked;
  $("chain-part").hidden = !isOwn;
  $("chain-note").hidden = isOwn;
  for (const node of document.querySelectorAll(".flat")) node.style.display = isOwn ? "none" : "";
  $("request").textContent = JSON.stringify(body(), null, 2);
}

async function send() {
  if (stopping) return;
  tokens = []; trace = null; chosen = null;
  $("text").replaceChildren();
  $("error").textContent = $("stats").textContent = "";
  $("token").replaceChildren(make("p", { className: "dim", style: "margin:0" },
    "Choose a token of the answer."));
  stopping = new AbortController();
  $("send").disabled = true; $("stop").disabled = false;
  const started = performance.now();
  try {
    const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(),
      body: JSON.stringify(body()), signal: stopping.signal });
    if (!answer.ok) throw new Error(told(await answer.json().catch(() => ({})), answer.status));
    await follow(answer.body, started);
  } catch (error) {
    if (error.name !== "AbortError") $("error").textContent = error.message;
  } finally {
    stopping = null;
    $("send").disabled = false; $("stop").disabled = true;
  }
}

async function follow(stream, started) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", first = null, reason = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        if (choice.logprobs && choice.logprobs.content) {
          first ??= performance.now() - started;
          choice.logprobs.content.forEach((each) => addToken(each, choice.delta));
        }
        if (choice.trace) trace = choice.trace;
        if (choice.finish_reason) reason = choice.finish_reason;
      }
      const seconds = (performance.now() - started) / 1000;
      const speed = tokens.length > 1 ? `, ${(tokens.length / seconds).toFixed(1)} tokens/s` : "";
      const wait = first === null ? "" : `, first after ${Math.round(first)} ms`;
      $("stats").textContent = `${tokens.length} tokens${wait}${speed}${reason && `, ${reason}`}`;
    }
  }
  if (chosen === null && tokens.length) choose(0); else if (chosen !== null) choose(chosen);
}

function addToken(each, delta) {
  const place = tokens.length;
  const chance = Math.exp(each.logprob);
  const node = make("span", { className: "token", tabIndex: 0, title: percent(chance),
    onclick: () => choose(place), onkeydown: (event) => {
      if (event.key === "Enter") choose(place);
      if (event.key === "ArrowRight" && tokens[place + 1]) tokens[place + 1].node.focus();
      if (event.key === "ArrowLeft" && tokens[place - 1]) tokens[place - 1].node.focus();
    } }, each.token);
  node.classList.toggle("reasoning", Boolean(delta.reasoning));
  node.style.background = `hsl(${120 * chance} ${75 - 15 * chance}% 55% / ${0.5 - 0.25 * chance})`;
  $("text").append(node);
  tokens.push({ text: each.token, logprob: each.logprob, top: each.top_logprobs, node });
}

// --- one token -----------------------------------------------------------------------------------

function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0001) return "<0.01 %";
  return `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
}

function choose(place) {
  chosen = place;
  tokens.forEach((each, number) => each.node.classList.toggle("chosen", number === place));
  const token = tokens[place];
  const listed = [...token.top];
  if (!listed.some((each) => each.token === token.text))
    listed.push({ token: token.text, logprob: token.logprob });
  const bars = listed.map((each) => {
    const chance = Math.exp(each.logprob);
    const fill = make("div", { className: "fill" });
    fill.style.width = `${Math.max(0.5, 100 * chance)}%`;
    return make("div", { className: `bar${each.token === token.text ? " picked" : ""}` },
      make("code", { title: JSON.stringify(each.token) }, JSON.stringify(each.token)),
      make("div", { className: "track" }, fill), make("span", {}, percent(chance)));
  });
  const where = $("logprobs_mode").value === "raw" ? "before the chain" : "after the chain";
  $("token").replaceChildren(
    make("p", { style: "margin:0 0 6px" }, `Token ${place + 1} of ${tokens.length}, `,
      make("b", {}, JSON.stringify(token.text)), make("span", { className: "dim" },
        ` – probabilities ${where}`)),
    ...bars, ...traced(place));
}

function traced(place) {
  const position = trace && trace.positions[place];
  if (!position) {
    const why = $("trace").checked ? "The trace comes with the end of the answer." :
      "Turn on the trace to see what each stage does.";
    return [make("p", { className: "dim small" }, why)];
  }
  const number = (value) => value === null ? "–" : value.toFixed(3);
  const rows = position.effects.map((each) => make("tr", {},
    make("td", {}, each.id, each.argmax_changed ? " ★" : ""),
    make("td", {}, `${each.alive_before} → ${each.alive_after}`),
    make("td", {}, percent(each.removed)), make("td", {}, percent(each.moved)),
    make("td", {}, `${number(each.entropy_before)} → ${number(each.entropy_after)}`)));
  const head = ["stage", "tokens alive", "removed", "moved", "entropy (nats)"];
  const parts = [make("h2", { style: "margin:16px 0 6px" }, "What each stage did"),
    make("div", { className: "scroll" }, make("table", {},
      make("tr", {}, ...head.map((each) => make("th", {}, each))), ...rows)),
    make("p", { className: "dim small", style: "margin:4px 0" },
      "★ another token came to the front. Moved: the share of probability that changed hands.")];
  if (position.tokens.length) {
    const points = ["model", ...position.effects.map((each) => each.id)];
    const paths = position.tokens.slice(0, 8).map((path) => make("tr", {},
      make("td", {}, make("code", {}, JSON.stringify(path.text)),
        path.id === position.token ? " ●" : ""),
      ...path.probs.map((value, at) => make("td", { className: path.ranks[at] === null ? "dead" : "" },
        path.ranks[at] === null ? "–" : percent(value)))));
    parts.push(make("h2", { style: "margin:16px 0 6px" }, "Probabilities after each stage"),
      make("div", { className: "scroll" }, make("table", {},
        make("tr", {}, make("th", {}, "token"), ...points.map((each) => make("th", {}, each))),
        ...paths)));
  }
  return parts;
}

// --- events --------------------------------------------------------------------------------------

$("send").addEventListener("click", send);
$("stop").addEventListener("click", () => stopping && stopping.abort());
$("own-chain").addEventListener("input", () => { drawChain(); show(); });
$("add").addEventListener("input", (event) => {
  if (event.target.value) addStage(event.target.value);
  event.target.value = "";
  drawChain();
  show();
});
$("sort").addEventListener("click", () => {
  const stages = schema["x-decodekit"].stages;
  chain.sort((a, b) => (stages[a.stage].order ?? 1e9) - (stages[b.stage].order ?? 1e9));
  drawChain();
  show();
});
$("clear-chain").addEventListener("click", () => { chain = []; drawChain(); show(); });
for (const id of ["prompt", "system", "model"]) $(id).addEventListener("input", show);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
$("key").addEventListener("change", begin);
$("copy").addEventListener("click", async () => {
  const quoted = JSON.stringify(body()).replaceAll("'", "'\\''");
  const url = new URL("v1/chat/completions", location.href);
  const key = $("key").value.trim() ? ` -H "Authorization: Bearer $DECODEKIT_API_KEY"` : "";
  await navigator.clipboard.writeText(
    `curl -N ${url} -H "Content-Type: application/json"${key} -d '${quoted}'`);
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy as curl"; }, 1500);
});
begin();
