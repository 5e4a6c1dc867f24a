// A system that looks at whole scenes: its looks come at once and are shown one by one.

import { api, request } from "./api.js";
import { openCamera } from "./camera.js";
import { Bars } from "./panels.js";
import { sceneName, Thumbnails } from "./thumbnails.js";
import { percent, readable, writeLarge } from "./words.js";

const at = (id) => document.getElementById(id);
const LONGER_SIDE = 720; // pixels the scene is drawn with
const state = { info: null, scene: null, looks: [], shown: 0, seed: 0, peek: false };
const STEP_MILLISECONDS = 750;
const UNSURE_BELOW = 0.5; // a system of the zoo has no threshold of its own: below this another answer may be likelier
let bars, thumbnails, player;

function complain(error) {
  const toast = at("toast");
  toast.textContent = error.message;
  toast.hidden = false;
  setTimeout(() => (toast.hidden = true), 6000);
}

const guarded = (action) => async (...given) => {
  try {
    await action(...given);
  } catch (error) {
    complain(error);
  }
};

async function use(blob, name, label, number) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  state.scene = { blob, bitmap, name, label, number };
  await look();
}

async function look() {
  const { scene, seed } = state;
  const policy = at("policy").value;
  const options = { method: "POST", headers: { "Content-Type": "image/png" }, body: scene.blob };
  const answer = await request(`looks?policy=${encodeURIComponent(policy)}&seed=${seed}`, options);
  const looks = await answer.json();
  if (scene !== state.scene) return; // another scene was chosen meanwhile
  state.looks = looks;
  play();
}

// Draws a part of the scene as coarse as it was sensed: what lies outside of the scene is left out.
function drawView(context, { box, size }) {
  const { bitmap } = state.scene;
  const { width, height } = context.canvas;
  const [top, left, bottom, right] = box.map((side) => Math.min(Math.max(side, 0), 1));
  if (right <= left || bottom <= top) return;
  const part = new OffscreenCanvas(
    Math.max(1, Math.round((size[1] * (right - left)) / (box[3] - box[1]))),
    Math.max(1, Math.round((size[0] * (bottom - top)) / (box[2] - box[0]))),
  );
  const small = part.getContext("2d");
  small.imageSmoothingQuality = "high";
  const source = [left * bitmap.width, top * bitmap.height, (right - left) * bitmap.width, (bottom - top) * bitmap.height];
  small.drawImage(bitmap, ...source, 0, 0, part.width, part.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(part, left * width, top * height, (right - left) * width, (bottom - top) * height);
}

function frame(context, { box }) {
  const { width, height } = context.canvas;
  const [top, left, bottom, right] = box.map((side) => Math.min(Math.max(side, 0), 1));
  const place = [left * width + 2, top * height + 2, (right - left) * width - 4, (bottom - top) * height - 4];
  for (const [colour, line] of [["#1d1c24", 6], ["#ff9f1c", 3]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(...place);
  }
}

const sharpness = ({ box, size }) => (size[0] * size[1]) / ((box[2] - box[0]) * (box[3] - box[1]));

function draw() {
  const { bitmap } = state.scene;
  const canvas = at("canvas");
  const scale = LONGER_SIDE / Math.max(bitmap.width, bitmap.height);
  [canvas.width, canvas.height] = [Math.round(bitmap.width * scale), Math.round(bitmap.height * scale)];
  const aspect = bitmap.width / bitmap.height;
  at("board").style.setProperty("--aspect", aspect);
  at("board").parentElement.style.setProperty("--scene-aspect", aspect);
  const context = canvas.getContext("2d");
  if (state.peek) {
    context.globalAlpha = 0.45;
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    context.globalAlpha = 1;
  }
  const seen = state.looks.slice(0, state.shown);
  const views = seen.flatMap((each) => each.views).sort((one, other) => sharpness(one) - sharpness(other));
  for (const view of views) drawView(context, view);
  for (const view of seen.length ? seen[seen.length - 1].views : []) frame(context, view);
}

function show(count) {
  const { looks, scene, info } = state;
  state.shown = Math.min(Math.max(count, 1), looks.length);
  const last = looks[state.shown - 1];
  const [height, width] = info.image_size;
  const share = last.pixels / (height * width);
  draw();
  const ended = state.shown === looks.length;
  const unsure = ended && last.confidence < UNSURE_BELOW;
  at("label").closest(".verdict").classList.toggle("unsure", unsure);
  writeLarge(at("label"), unsure ? "unsure" : readable(last.label));
  const sure = percent(last.confidence);
  at("confidence").textContent = unsure ? `probably ${readable(last.label)} (${sure})` : sure;
  const truth = at("truth");
  truth.hidden = scene.label === null || !ended;
  truth.textContent = last.label === scene.label ? "✓ right" : `✗ it is ${readable(scene.label ?? "")}`;
  truth.className = last.label === scene.label ? "right" : "wrong";
  const name = scene.number < 0 ? "Your image" : sceneName(scene.number);
  at("scene-name").textContent = ended ? `${name}: ${scene.name}` : name;
  at("status").textContent = `Look ${state.shown} of ${looks.length}.`;
  at("seen-text").textContent = `${last.pixels.toLocaleString("en")} pixels used to classify, ${percent(share)} of the scene's`;
  at("seen-share").style.setProperty("--share", Math.min(share, 1));
  bars.show(last.probabilities, 1);
  at("back").disabled = state.shown <= 1;
  at("step").disabled = state.shown >= looks.length;
}

async function choose(id, scenes) {
  const { name, label } = scenes[id];
  thumbnails.mark(id);
  await use(await api.scene(id), name, label, id);
}

async function useFile(file) {
  if (!file) return;
  const blob = await api.view(file);
  const name = file.name || "Your image";
  const open = guarded(async () => {
    thumbnails.mark(-1);
    await use(blob, name, null, -1);
  });
  thumbnails.addOwn(blob, name, open);
  thumbnails.mark(-1);
  await use(blob, name, null, -1);
}

// Shows one look after the other; nothing moves for those who asked their system for less motion.
function play() {
  clearInterval(player);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return show(state.looks.length);
  show(1);
  player = setInterval(() => {
    if (state.shown >= state.looks.length) clearInterval(player);
    else show(state.shown + 1);
  }, STEP_MILLISECONDS);
  return undefined;
}

function turn(step) {
  clearInterval(player);
  show(state.shown + step);
}

async function begin() {
  state.info = await (await request("looker")).json();
  const { info } = state;
  const said = (whole) => (whole ? "yes" : "no");
  at("name").textContent = info.name;
  at("sees").textContent = `Whole image to attend: ${said(info.whole_to_attend)}; to classify: ${said(info.whole_to_classify)}.`;
  at("policy").append(...info.policies.map((name) => new Option(name, name, name === info.policy, name === info.policy)));
  bars = new Bars(at("bars"), info.labels);
  const scenes = await api.scenes();
  const pick = guarded((id) => choose(id, scenes));
  const open = guarded(useFile);
  thumbnails = new Thumbnails(at("thumbnails"), scenes, pick);
  const again = guarded(look);
  at("policy").addEventListener("change", again);
  at("restart").addEventListener("click", () => (state.seed++, again()));
  at("back").addEventListener("click", () => turn(-1));
  at("step").addEventListener("click", () => turn(1));
  at("play").addEventListener("click", play);
  at("peek").addEventListener("click", () => {
    state.peek = !state.peek;
    at("peek").setAttribute("aria-pressed", state.peek);
    draw();
  });
  at("upload").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", () => open(at("file").files[0]));
  at("camera").addEventListener("click", guarded(() => openCamera(at("camera-dialog"), open)));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    open(event.dataTransfer.files[0]);
  });
  const keys = { " ": "play", ArrowLeft: "back", ArrowRight: "step", r: "restart", p: "peek", u: "upload", c: "camera" };
  document.addEventListener("keydown", (event) => {
    const button = keys[event.key];
    if (!button || event.target.closest("select, input, dialog") || (event.key === " " && event.target.closest("button")) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    at(button).click();
  });
  await choose(0, scenes);
}

guarded(begin)();
