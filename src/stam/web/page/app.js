// The page: one scene, several ways of looking at it, one clock.

import { api, connectTo } from "./api.js";
import { Bars, Chart } from "./panels.js";
import { Board } from "./board.js";
import { openCamera } from "./camera.js";
import { Scene } from "./scene.js";
import { sceneName, Thumbnails } from "./thumbnails.js";
import { Track } from "./track.js";
import { percent, readable, writeLarge } from "./words.js";

const STEP_MILLISECONDS = 750;
const AFTER_STOP_MILLISECONDS = 200; // the others hurry on once the agent is sure

const $ = (id) => document.getElementById(id);
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const titles = { learned: "Learned", random: "Random", spiral: "Spiral", plus: "Plus", "centre-out": "Centre out" };
const titleOf = (policy) => titles[policy.split(":")[0]]; // learned:8 is the learned policy

const asked = new URLSearchParams(location.search);
const SPEEDS = [0.5, 1, 2, 4];
// Nothing moves by itself for those who asked their system for less motion, nor with ?play=0.
const playsByItself = asked.get("play") !== "0" && !matchMedia("(prefers-reduced-motion: reduce)").matches;

let agent, scenes, tracks, boards, bars, chart, thumbnails;
let lookers = []; // who looks: { api, agent, policy, title, id }, the served agent first
let speed = 1;
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
  lookers = await whoLooks();
  buildRivals();
  boards = lookers.map((looker, index) =>
    index === 0
      ? new Board($("board"), agent, { onChoose: overrule, label: "The scene, a grid of squares" })
      : new Board($(`rival-${looker.id}`), looker.agent, { label: looker.title }),
  );
  bars = new Bars($("bars"), agent.labels);
  chart = new Chart($("chart"), agent.grid.rows * agent.grid.columns);
  thumbnails = new Thumbnails($("thumbnails"), scenes, openScene);
  $("threshold").value = Math.round(threshold * 100);
  describeAgent();
  connect();
  await openScene(startScene());
  document.body.classList.add("ready");
}

function startScene() {
  const number = Number(asked.get("scene") ?? 0);
  return Number.isInteger(number) && number >= 0 && number < scenes.length ? number : 0;
}

// The agent, and beside it a second one, or two simple ways to choose where to look.
async function whoLooks() {
  const own = { api, agent, policy: agent.policy, title: titleOf(agent.policy), id: "own" };
  if (agent.beside) {
    const other = connectTo("beside/api/");
    const second = await other.agent();
    own.title = agent.name;
    return [own, { api: other, agent: second, policy: second.policy, title: second.name, id: "beside" }];
  }
  const simple = ["random", "spiral", "plus"].filter((name) => name !== agent.policy).slice(0, 2);
  return [own, ...simple.map((policy) => ({ api, agent, policy, title: titleOf(policy), id: policy }))];
}

function buildRivals() {
  if (agent.beside) {
    $("rivals-title").textContent = "A second agent, the same scene";
    $("rivals").classList.add("one");
  }
  $("rivals").replaceChildren(
    ...lookers.slice(1).map(({ id, title }, index) => {
      const figure = document.createElement("figure");
      figure.className = `rival series-${index + 2}`;
      figure.innerHTML = `<figcaption><b></b><span></span></figcaption><div class="board small"></div>`;
      figure.querySelector("b").textContent = title;
      figure.querySelector("span").id = `result-${id}`;
      figure.querySelector(".board").id = `rival-${id}`;
      return figure;
    }),
  );
}

function describeAgent() {
  const { rows, columns, glimpse_size: [glimpseHeight, glimpseWidth] } = agent.grid;
  $("facts").textContent =
    `${agent.name}: ${agent.labels.length} labels, ${rows}×${columns} glimpses of ${glimpseHeight}×${glimpseWidth} pixels, ` +
    `${titleOf(agent.policy).toLowerCase()} policy.`;
}

// A scene, and a start

async function openScene(number) {
  sceneNumber = number;
  thumbnails.mark(number);
  const { name, label } = scenes[number];
  await guarded(async () => begin(await api.scene(number), { name, label }));
  if (playsByItself && sceneNumber === number && !player) play();
}

async function openFile(file) {
  if (!file) return;
  await guarded(async () => {
    const blob = await api.view(file);
    const scene = { name: file.name || "Your image", label: null };
    const open = () =>
      guarded(async () => {
        sceneNumber = -1;
        thumbnails.mark(-1);
        await begin(blob, scene);
      });
    sceneNumber = -1;
    await begin(blob, scene);
    thumbnails.addOwn(blob, scene.name, open);
    thumbnails.mark(-1);
  });
  if (playsByItself && sceneNumber === -1 && !player) play();
}

// Saves the look as it stands. Of the scene only the uncovered squares are sent, to be drawn into a GIF.
async function share() {
  const own = tracks[0];
  const count = own.shownAt(time, threshold);
  if (count === 0) return complain("Nothing has been looked at yet: press play first.");
  pause();
  $("share").disabled = true;
  try {
    const done = isDone(own);
    const look = {
      scene: boards[0].picture(),
      steps: own.entries.slice(0, count).map(({ sensed, label, confidence }) => ({ location: sensed, label: readable(label), confidence })),
      name: `${agent.name} looks`,
      unsure: isUnsure(own, count),
      milliseconds: Math.max(60, Math.round(450 / speed)),
    };
    if (done && own.scene.label) look.truth = readable(own.scene.label);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await api.animation(look));
    link.download = `stam-${sceneNumber < 0 ? "own" : sceneNumber + 1}.gif`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    return say("The look is saved as a GIF.");
  } catch (error) {
    return complain(error.message);
  } finally {
    $("share").disabled = false;
  }
}

// Opens the sessions: the agent's own first, where it begins or where a seed says, and the others where that one starts.
async function begin(blob, about, seed) {
  pause();
  run += 1;
  const shared = await Scene.fromBlob(blob, agent, about);
  const fresh = await Promise.all(
    lookers.map(async (looker) => {
      const scene = looker.agent === agent ? shared : await Scene.fromBlob(blob, looker.agent, about);
      return new Track(looker.api, looker.agent, scene, looker.policy);
    }),
  );
  tracks?.forEach((track) => track.close());
  const repeatable = seed ?? Math.max(0, sceneNumber);
  await fresh[0].open(null, seed); // without a seed, where the agent always begins
  await Promise.all(fresh.slice(1).map((track) => track.open(matching(fresh[0].first, track.agent.grid), repeatable)));
  Object.assign(shared, { blob, about });
  tracks = fresh;
  time = 0;
  setPeek(false);
  render();
}

// The square of another grid that covers the middle of a square of ours.
function matching([row, column], grid) {
  const { rows, columns } = agent.grid;
  return [Math.floor(((row + 0.5) / rows) * grid.rows), Math.floor(((column + 0.5) / columns) * grid.columns)];
}

async function restart() {
  const { blob, about } = tracks[0].scene;
  await guarded(() => begin(blob, about, Math.floor(Math.random() * 2 ** 31)));
  if (playsByItself && !player) play();
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
    await wait(Math.max(0, pace / speed - (performance.now() - started)));
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
  tracks.slice(1).forEach((track, index) => renderRival(track, shown[index + 1], lookers[index + 1]));
  chart.show(
    tracks.map((track, index) => ({
      name: lookers[index].title,
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
  const unsure = isUnsure(own, count);
  panel.classList.toggle("stopped", stopped && !unsure);
  panel.classList.toggle("unsure", unsure);
  const words = entry ? readable(entry.label) : "?";
  writeLarge($("label"), unsure ? "unsure" : words);
  const sure = entry ? percent(entry.confidence) : "";
  $("confidence").textContent = unsure ? `probably ${words} (${sure})` : entry ? `${sure} sure` : "";
  $("status").textContent = statusText(count, stopped, total);
  $("seen-share").style.setProperty("--share", count / total);
  $("seen-text").textContent = `${count} of ${total} glimpses, ${percent(count / total)} seen`;
  const truth = own.scene.label;
  $("truth").hidden = !(truth && stopped);
  if (truth && stopped) {
    $("truth").textContent = entry.label === truth ? "✓ right" : `✗ it is ${readable(truth)}`;
    $("truth").className = entry.label === truth ? "right" : "wrong";
  }
  const number = sceneNumber < 0 ? "Your image" : sceneName(sceneNumber);
  $("scene-name").textContent = stopped ? `${number}: ${own.scene.name}` : number;
  $("scene-name").title = stopped ? own.scene.name : "";
  bars.show(entry?.probabilities, threshold);
}

// Everything has been seen, and it is still not as sure as it has to be to stop.
function isUnsure(track, count) {
  const entry = track.entries[count - 1];
  return Boolean(entry) && entry.location === null && entry.confidence <= threshold;
}

function statusText(count, stopped, total) {
  if (count === 0) return "Nothing seen yet. Press play, or choose a square.";
  if (isUnsure(tracks[0], count)) return "Everything has been seen, and it is not sure enough.";
  if (stopped && count < total) {
    const looking = tracks.slice(1).filter((track) => !isDone(track)).length;
    return looking ? "Sure enough: it stops. The others still look." : "Sure enough: it stops.";
  }
  if (count === total) return "Everything has been seen.";
  return tracks[0].lookOn ? "Looking on, to be surer." : "Not sure yet: it looks on.";
}

function renderRival(track, count, { id }) {
  const entry = track.entries[count - 1];
  const when = isUnsure(track, count) ? "unsure" : isDone(track) ? `after ${count}` : "sure";
  const result = $(`result-${id}`);
  result.textContent = entry ? `${percent(entry.confidence)} ${when} · ${readable(entry.label)}` : "ready";
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
  return say(`Glimpse ${count} at ${place}: ${readable(entry.label)}, ${percent(entry.confidence)} sure.${stopped}`);
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
  $("camera").addEventListener("click", takePicture);
  $("share").addEventListener("click", share);
  $("speed").addEventListener("click", () => setSpeed(SPEEDS[(SPEEDS.indexOf(speed) + 1) % SPEEDS.length]));
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
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
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

function takePicture() {
  pause();
  openCamera($("camera-dialog"), openFile).catch((error) => complain(error.message));
}

function setSpeed(factor) {
  speed = factor;
  $("speed").textContent = `${factor}×`.replace("0.5", "½");
  $("speed").setAttribute("aria-label", `Speed: ${factor} times`);
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
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
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
    c: takePicture,
    s: share,
    v: () => $("speed").click(),
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
