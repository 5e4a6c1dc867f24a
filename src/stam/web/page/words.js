// Names as people write them, and the answer in words.

// english_springer and StorageTanks are names of folders: a person writes words.
export function readable(label) {
  const words = label.replace(/_+/g, " ").trim();
  if (!/[a-z][A-Z]/.test(words)) return words;
  return words[0] + words.slice(1).replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
}

export function percent(value) {
  const rounded = Math.round(value * 100);
  return `${rounded === 100 && value < 0.9995 ? 99 : rounded}%`;
}

const SIZES = [4, 3, 2.4, 1.9, 1.55, 1.25, 1]; // rem

// Writes a word as large as it fits, and breaks lines between words only.
export function writeLarge(element, text) {
  if (element.textContent === text && element.dataset.width === String(element.parentElement.clientWidth)) return;
  element.textContent = text;
  const room = element.parentElement.clientWidth;
  element.dataset.width = room;
  for (const size of SIZES.slice(text.length > 3 ? 2 : 0)) {
    element.style.fontSize = `${size}rem`;
    const lines = Math.round(element.offsetHeight / (size * 16 * 1.1));
    if (element.scrollWidth <= Math.min(room, element.clientWidth + 1) && lines <= (size > 2 ? 1 : 2)) return;
  }
}
