// One way of looking at the scene: a session and everything it has said, so that one can go back without asking again.

import { ApiError } from "./api.js";

export class Track {
  constructor(api, agent, scene, policy) {
    Object.assign(this, { api, agent, scene, policy });
    this.entries = []; // after each glimpse: { location, overruled, ...what the agent said }
    this.lookOn = false; // whether to go on past the point where it is sure
  }

  async open(firstLocation, seed) {
    const settings = { policy: this.policy };
    if (seed !== undefined) settings.seed = seed;
    if (firstLocation) settings.first_location = firstLocation;
    const session = await this.api.open(settings);
    this.id = session.id;
    this.first = session.location;
    return this;
  }

  close() {
    if (this.id) this.api.close(this.id);
  }

  // How many glimpses it needs to be surer than the threshold; none if it has not got there yet.
  stopsAt(threshold) {
    const index = this.entries.findIndex((entry) => entry.confidence > threshold || entry.location === null);
    return index < 0 ? null : index + 1;
  }

  // How many glimpses are shown at a moment: it stands still once it is sure.
  shownAt(time, threshold) {
    const stop = this.lookOn ? null : this.stopsAt(threshold);
    return Math.min(time, this.entries.length, stop ?? Infinity);
  }

  isDone(time, threshold) {
    const total = this.agent.grid.rows * this.agent.grid.columns;
    if (this.shownAt(time, threshold) >= total) return true;
    const stop = this.stopsAt(threshold);
    return !this.lookOn && stop !== null && stop <= time;
  }

  next(count) {
    return count === 0 ? this.first : this.entries[count - 1].location;
  }

  // Makes sure that `count` glimpses have been seen, one more than before at most.
  async reach(count) {
    if (this.entries.length >= count || this.next(this.entries.length) === null) return;
    const location = this.next(this.entries.length);
    this.entries.push({ ...(await this.#observe(location)), sensed: location, overruled: false });
  }

  // Forgets what came after `count` glimpses and looks where the visitor says.
  async overrule(count, location) {
    if (this.entries.length > count) {
      await this.#withSession(() => this.api.rewind(this.id, count), count);
      this.entries.length = count;
    }
    this.entries.push({ ...(await this.#observe(location)), sensed: location, overruled: true });
  }

  #observe(location) {
    const count = this.entries.length;
    return this.#withSession(() => this.api.observe(this.id, this.scene.sense(location), location, count), count);
  }

  // A session that has expired, or has seen what we never heard of, is opened again and shown the first `count` glimpses.
  async #withSession(action, count) {
    try {
      return await action();
    } catch (error) {
      if (!(error instanceof ApiError) || ![404, 409].includes(error.status)) throw error;
      const first = this.first;
      await this.open(first);
      for (const [index, entry] of this.entries.slice(0, count).entries())
        await this.api.observe(this.id, this.scene.sense(entry.sensed), entry.sensed, index);
      return action();
    }
  }
}
