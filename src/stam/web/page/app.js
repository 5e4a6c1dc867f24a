// The page: one scene, three ways of looking at it, one clock.

import { api } from "./api.js";
import { Bars, Chart } from "./panels.js";
import { Board, percent } from "./board.js";
import { Scene } from "./scene.js";
import { Track } from "./track.js";

const STEP_MILLISECONDS = 750;
const AFTER_STOP_MILLISECONDS = 200; // the others hurry on once the agent is sure

const $ = (id) => document.getElementById(id);
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const titles = { learned: "Learned", random: "Random", spiral: "Spiral", plus: "Plus", "centre-out": "Centre out" };
const titleOf = (policy) => titles[policy.split(":")[0]]; // learned:8 is the learned policy

let agent, scenes, tracks, boards, bars, chart;
let sceneNumber = 0; // -1 is an image of the visitor's
let time = 0; // glimpses on the clock
let threshold = 0.9;
let player = null; // the loop that plays, if one does
let peek = false;
let busy = Promise.resolve(); // requests go one after another
let run = 0; // counts scenes and restarts

async function start() {
  agent = await api.agent();
  scenes = await api.scenes();
  threshold = agent.threshold;
  const [height, width] = agent.grid.image_size;
  document.documentElement.style.setProperty("--scene-aspect", width / height);
  const policies = [agent.policy, ...["random", "spiral", "plus"].filter((name) => name !== agent.policy).slice(0, 2)];
  buildRivals(policies.slice(1));
  boards = policies.map((policy, index) =>
    index === 0
      ? new Board($("board"), agent, { onChoose: overrule, label: "The scene, a grid of squares" })
      : new Board($(`rival-${policy}`), agent, { label: titleOf(policy) }),
  );
  bars = new Bars($("bars"), agent.labels);
  chart = new Chart($("chart"), agent.grid.rows * agent.grid.columns);
  $("scene").replaceChildren(...scenes.map((scene) => new Option(scene.name, scene.id)));
  $("threshold").value = Math.round(threshold * 100);
  describeAgent(policies);
  connect();
  await openScene(startScene());
  document.body.classList.add("ready");
}

function startScene() {
  const asked = Number(new URLSearchParams(location.search).get("scene") ?? 0);
  return Number.isInteger(asked) && asked >= 0 && asked < scenes.length ? asked : 0;
}

function buildRivals(policies) {
  $("rivals").replaceChildren(
    ...policies.map((policy, index) => {
      const figure = document.createElement("figure");
      figure.className = `rival series-${index + 2}`;
      figure.innerHTML = `<figcaption><b></b><span></span></figcaption><div class="board small"></div>`;
      figure.querySelector("b").textContent = titleOf(policy);
      figure.querySelector("span").id = `result-${policy}`;
      figure.querySelector(".board").id = `rival-${policy}`;
      return figure;
    }),
  );
}

function describeAgent(policies) {
  const { rows, columns, glimpse_size: [glimpseHeight, glimpseWidth] } = agent.grid;
  $("facts").textContent =
    `${agent.name}: ${agent.labels.length} labels, ${rows}×${columns} glimpses of ${glimpseHeight}×${glimpseWidth} pixels, ` +
    `${titleOf(policies[0]).toLowerCase()} policy.`;
}

// A scene, and a start

async function openScene(number) {
  sceneNumber = number;
  const { name, label } = scenes[number];
  $("scene").value = String(number);
  await guarded(async () => begin(await Scene.fromBlob(await api.scene(number), agent, { name, label })));
}

async function openFile(file) {
  if (!file) return;
  await guarded(async () => {
    const scene = await Scene.fromBlob(await api.view(file), agent, { name: file.name || "Your image" });
    sceneNumber = -1;
    $("scene").querySelector("option[value='-1']")?.remove();
    $("scene").append(new Option(scene.name, -1, true, true));
    await begin(scene);
  });
}

// Opens the sessions: the agent's own first, at the centre or where a seed says, and the others where that one starts.
async function begin(scene, seed) {
  pause();
  run += 1;
  tracks?.forEach((track) => track.close());
  const fresh = boards.map((board, index) => new Track(agent, scene, [agent.policy, ...rivalPolicies()][index]));
  const repeatable = seed ?? Math.max(0, sceneNumber);
  const centre = [agent.grid.rows, agent.grid.columns].map((count) => Math.floor(count / 2));
  await fresh[0].open(seed === undefined ? centre : null, repeatable);
  await Promise.all(fresh.slice(1).map((track) => track.open(fresh[0].first, repeatable)));
  tracks = fresh;
  time = 0;
  setPeek(false);
  render();
}

function rivalPolicies() {
  return [...document.querySelectorAll(".rival .board")].map((board) => board.id.replace("rival-", ""));
}

function restart() {
  guarded(() => begin(tracks[0].scene, Math.floor(Math.random() * 2 ** 31)));
}

// The clock

const isDone = (track) => track.isDone(time, threshold);

async function advance() {
  const here = run;
  if (tracks.every(isDone)) {
    if (!tracks[0].next(tracks[0].shownAt(time, threshold))) return false; // everything has been seen
    tracks[0].lookOn = true;
    time = tracks[0].shownAt(time, threshold);
  }
  const looking = tracks.filter((track) => !isDone(track));
  await Promise.all(looking.map((track) => track.reach(time + 1)));
  if (here !== run) return false;
  time += 1;
  render();
  announce();
  return true;
}

function back() {
  pause();
  const furthest = Math.max(...tracks.map((track) => track.shownAt(time, threshold)));
  time = Math.max(0, Math.min(time, furthest) - 1);
  tracks[0].lookOn = tracks[0].lookOn && time > (tracks[0].stopsAt(threshold) ?? 0);
  render();
  announce();
}

async function play() {
  if (player) return pause();
  if (tracks.every(isDone)) time = 0; // a film that has ended starts again
  const mine = {};
  player = mine;
  render();
  while (player === mine) {
    const started = performance.now();
    const went = await guarded(advance);
    if (player !== mine) return undefined;
    if (!went || tracks.every(isDone)) return pause();
    const pace = isDone(tracks[0]) ? AFTER_STOP_MILLISECONDS : STEP_MILLISECONDS;
    await wait(Math.max(0, pace - (performance.now() - started)));
  }
  return undefined;
}

function pause() {
  player = null;
  if (tracks) renderControls();
}

async function overrule(location) {
  pause();
  await guarded(async () => {
    const own = tracks[0];
    const count = own.shownAt(time, threshold);
    const seen = own.entries.slice(0, count).some(({ sensed }) => sensed[0] === location[0] && sensed[1] === location[1]);
    if (seen) return say("That square has been seen already.");
    own.lookOn = own.lookOn || own.stopsAt(threshold) === count;
    await own.overrule(count, location);
    await Promise.all(tracks.slice(1).filter((track) => !isDone(track)).map((track) => track.reach(count + 1)));
    time = count + 1;
    render();
    return announce();
  });
}

// One action after another; what goes wrong is said.
function guarded(action) {
  const turn = busy.then(action).catch((error) => {
    pause();
    complain(error.message);
    return false;
  });
  busy = turn;
  return turn;
}

// Showing

function render() {
  const shown = tracks.map((track) => track.shownAt(time, threshold));
  tracks.forEach((track, index) => {
    const done = isDone(track) && shown[index] > 0;
    const sure = done && track.entries[shown[index] - 1].confidence > threshold;
    boards[index].show(track, shown[index], { peek, done, sure });
  });
  renderVerdict(shown[0]);
  tracks.slice(1).forEach((track, index) => renderRival(track, shown[index + 1]));
  chart.show(
    tracks.map((track, index) => ({
      name: titleOf(track.policy),
      series: `series-${index + 1}`,
      values: track.entries.slice(0, shown[index]).map((entry) => entry.confidence),
      stopped: isDone(track) && shown[index] > 0,
    })),
    threshold,
  );
  renderControls();
}

function renderVerdict(count) {
  const own = tracks[0];
  const entry = own.entries[count - 1];
  const total = agent.grid.rows * agent.grid.columns;
  const stopped = count > 0 && own.stopsAt(threshold) === count;
  const panel = $("label").closest(".verdict");
  panel.classList.toggle("stopped", stopped);
  $("label").textContent = entry ? entry.label : "?";
  const length = entry?.label.length ?? 0;
  $("label").classList.toggle("word", length > 3 && length <= 9);
  $("label").classList.toggle("long", length > 9);
  $("confidence").textContent = entry ? `${percent(entry.confidence)} sure` : "";
  $("status").textContent = statusText(count, stopped, total);
  $("seen-share").style.setProperty("--share", count / total);
  $("seen-text").textContent = `${count} of ${total} glimpses, ${percent(count / total)} seen`;
  const truth = own.scene.label;
  $("truth").hidden = !(truth && stopped);
  if (truth && stopped) {
    $("truth").textContent = entry.label === truth ? "✓ right" : `✗ it is ${truth}`;
    $("truth").className = entry.label === truth ? "right" : "wrong";
  }
  bars.show(entry?.probabilities, threshold);
}

function statusText(count, stopped, total) {
  if (count === 0) return "Nothing seen yet. Press play, or choose a square.";
  if (stopped && count < total) {
    const looking = tracks.slice(1).filter((track) => !isDone(track)).length;
    return looking ? "Sure enough: it stops. The others still look." : "Sure enough: it stops.";
  }
  if (count === total) return "Everything has been seen.";
  return tracks[0].lookOn ? "Looking on, to be surer." : "Not sure yet: it looks on.";
}

function renderRival(track, count) {
  const entry = track.entries[count - 1];
  const when = isDone(track) ? `after ${count}` : "sure";
  const result = $(`result-${track.policy}`);
  result.textContent = entry ? `${percent(entry.confidence)} ${when} · ${entry.label}` : "ready";
  result.title = result.textContent;
}

function renderControls() {
  $("play").classList.toggle("playing", Boolean(player));
  $("play").setAttribute("aria-label", player ? "Pause" : "Play");
  $("back").disabled = time === 0;
  const own = tracks[0];
  $("step").disabled = tracks.every(isDone) && !own.next(own.shownAt(time, threshold));
  $("threshold-value").textContent = percent(threshold);
}

function announce() {
  const count = tracks[0].shownAt(time, threshold);
  const entry = tracks[0].entries[count - 1];
  if (!entry) return say("Nothing seen.");
  const place = `row ${entry.sensed[0] + 1}, column ${entry.sensed[1] + 1}`;
  const stopped = tracks[0].stopsAt(threshold) === count ? " It stops." : "";
  return say(`Glimpse ${count} at ${place}: ${entry.label}, ${percent(entry.confidence)} sure.${stopped}`);
}

function say(words) {
  $("announcer").textContent = words;
}

let toastTimer;
function complain(words) {
  $("toast").textContent = words;
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => ($("toast").hidden = true), 7000);
}

function setPeek(on) {
  peek = on;
  $("peek").setAttribute("aria-pressed", String(on));
}

// Hands

function connect() {
  $("play").addEventListener("click", play);
  $("step").addEventListener("click", step);
  $("back").addEventListener("click", back);
  $("restart").addEventListener("click", restart);
  $("peek").addEventListener("click", togglePeek);
  $("next-scene").addEventListener("click", () => turnTo(1));
  $("previous-scene").addEventListener("click", () => turnTo(-1));
  $("scene").addEventListener("change", () => Number($("scene").value) >= 0 && openScene(Number($("scene").value)));
  $("upload").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => openFile($("file").files[0]).then(() => ($("file").value = "")));
  $("threshold").addEventListener("input", () => {
    threshold = Number($("threshold").value) / 100;
    tracks[0].lookOn = false;
    render();
  });
  $("help").addEventListener("click", () => $("help-dialog").showModal());
  connectTheme();
  document.addEventListener("keydown", onKey);
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => openFile(event.clipboardData.files[0]));
  window.addEventListener("resize", () => tracks && render());
  window.addEventListener("pagehide", () => tracks?.forEach((track) => track.close()));
}

function step() {
  pause();
  guarded(advance);
}

function togglePeek() {
  setPeek(!peek);
  render();
}

function turnTo(direction) {
  const count = scenes.length;
  openScene((Math.max(0, sceneNumber) + direction + count) % count);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help-dialog").open) return;
  const { target } = event;
  if (target.matches("input, select, textarea")) return;
  if (event.key === " " && target.matches("button, a")) return; // presses what has the focus
  const actions = {
    " ": play,
    ArrowRight: step,
    ArrowLeft: back,
    r: restart,
    n: () => turnTo(1),
    b: () => turnTo(-1),
    p: togglePeek,
    u: () => $("file").click(),
    "?": () => $("help-dialog").showModal(),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function connectTheme() {
  const themes = ["system", "light", "dark"];
  let theme = recall("stam-theme") ?? "system";
  const apply = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system" : theme}`);
    $("theme").title = $("theme").getAttribute("aria-label");
  };
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    remember("stam-theme", theme);
    apply();
  });
  apply();
}

// A browser may forbid a page to remember anything.
function recall(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // then the next visit starts as the system says
  }
}

start().catch((error) => complain(error.message));
