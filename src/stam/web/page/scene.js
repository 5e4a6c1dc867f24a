// A scene that lies in this browser. It is a sensor: it gives away one glimpse at a time.

export class Scene {
  static async fromBlob(blob, agent, { name, label = null }) {
    const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
    const [height, width] = agent.grid.image_size;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d", { willReadFrequently: true });
    if (bitmap.width === width && bitmap.height === height) context.drawImage(bitmap, 0, 0);
    else context.drawImage(bitmap, 0, 0, width, height); // a second agent may take scenes of another size
    return new Scene(canvas, context, agent, name, label);
  }

  constructor(canvas, context, agent, name, label) {
    Object.assign(this, { canvas, context, agent, name, label });
  }

  box([row, column]) {
    const [height, width] = this.agent.grid.glimpse_size;
    return [column * width, row * height, width, height];
  }

  // The pixels of a glimpse as bytes, row by row, as many channels as the agent has.
  sense(location) {
    const { data } = this.context.getImageData(...this.box(location));
    const { channels } = this.agent;
    const pixels = new Uint8Array((data.length / 4) * channels);
    for (let pixel = 0; pixel * 4 < data.length; pixel++) {
      for (let channel = 0; channel < channels; channel++) pixels[pixel * channels + channel] = data[pixel * 4 + channel];
    }
    return pixels;
  }
}
