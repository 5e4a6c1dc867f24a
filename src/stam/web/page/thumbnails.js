// The scenes as small pictures. Their names say nothing of what they show.

export const sceneName = (number) => `Scene ${number + 1}`;

export class Thumbnails {
  constructor(list, scenes, onChoose) {
    Object.assign(this, { list, onChoose });
    list.replaceChildren(...scenes.map((scene) => this.#make(`api/scenes/${scene.id}/thumbnail`, sceneName(scene.id), () => onChoose(scene.id))));
    this.own = null;
  }

  #make(source, name, action) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-label", name);
    button.title = name;
    const image = document.createElement("img");
    Object.assign(image, { src: source, alt: "", loading: "lazy", width: 56, height: 56, draggable: false });
    button.append(image);
    button.addEventListener("click", action);
    item.append(button);
    return item;
  }

  // Puts an image of the visitor's at the front.
  addOwn(blob, name, action) {
    this.own?.remove();
    if (this.ownUrl) URL.revokeObjectURL(this.ownUrl);
    this.ownUrl = URL.createObjectURL(blob);
    this.own = this.#make(this.ownUrl, name, action);
    this.own.classList.add("own-image");
    this.list.prepend(this.own);
  }

  // -1 is the visitor's image.
  mark(number) {
    const current = number < 0 ? this.own : [...this.list.children].filter((item) => item !== this.own)[number];
    for (const item of this.list.children) {
      const button = item.firstElementChild;
      if (item === current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    if (!current) return;
    const { offsetLeft, offsetWidth } = current; // without moving the page, as scrollIntoView would
    this.list.scrollTo({ left: offsetLeft - (this.list.clientWidth - offsetWidth) / 2 });
  }
}
