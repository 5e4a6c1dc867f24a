// The HTTP API, as any remote sensor would use it.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, options = {}, root = "api/") {
  let answer;
  try {
    answer = await fetch(`${root}${path}`, options);
  } catch {
    throw new ApiError(0, "The service does not answer. Is stam serve still running?");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({ error: `The service answered ${answer.status}.` }));
  throw new ApiError(answer.status, problem.error);
}

function json(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

// The API of the agent, or of a second one beside it.
export function connectTo(root) {
  const ask = (path, options) => request(path, options, root);
  return {
    agent: async () => (await ask("agent")).json(),
    open: async (settings) => (await ask("sessions", json(settings))).json(),
    rewind: async (id, count) => (await ask(`sessions/${id}/rewind`, json({ num_glimpses: count }))).json(),
    close: (id) => ask(`sessions/${id}`, { method: "DELETE", keepalive: true }).catch(() => {}),
    // `count` glimpses came before this one: so the service knows one that is sent twice, and takes it once.
    observe: async (id, pixels, [row, column], count) => {
      const options = { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: pixels };
      const path = `sessions/${id}/glimpses?map=true&row=${row}&column=${column}&num_glimpses=${count}`;
      const answer = await ask(path, options).catch((error) => {
        if (error.status !== 0) throw error;
        return ask(path, options); // no answer: once more
      });
      return answer.json();
    },
  };
}

export const api = {
  ...connectTo("api/"),
  scenes: async () => (await request("scenes")).json(),
  scene: async (id) => (await request(`scenes/${id}`)).blob(),
  view: async (file) =>
    (await request("view", { method: "POST", headers: { "Content-Type": file.type || "image/png" }, body: file })).blob(),
  animation: async (look) => (await request("animation", json(look))).blob(),
};
