// Hearing the service: server-sent events over fetch, since EventSource cannot show a token.

const SILENT_MS = 15_000; // The service sends a comment every 5 seconds.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  const token = sessionStorage.getItem("token");
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function answer(path, more, signal) {
  // A browser would follow a redirect to another process without the token.
  const found = await fetch(path, { headers: headers(more), cache: "no-store", redirect: "manual", signal });
  if (found.type === "opaqueredirect") throw new Refused(307, "another process has this, and is not heard yet");
  if (!found.ok) {
    const said = await found.json().catch(() => ({}));
    throw new Refused(found.status, said.message ?? `the service answers ${found.status}`);
  }
  return found;
}

export async function getJson(path) {
  return (await answer(path, {}, AbortSignal.timeout(SILENT_MS))).json();
}

// The lists of several processes as one. A process that has nothing of that name answers 404.
export async function getLists(addresses, path) {
  const answers = await Promise.allSettled(addresses.map((at) => getJson(at + path)));
  const found = answers.filter((each) => each.status === "fulfilled");
  if (!found.length) throw (answers.find((each) => each.reason.status !== 404) ?? answers[0]).reason;
  return found.flatMap((each) => each.value);
}

// Calls `heard` with each event's data, until the connection ends or `signal` ends it; then throws.
export async function follow(path, heard, signal) {
  const abort = new AbortController();
  const stop = () => abort.abort();
  signal.addEventListener("abort", stop);
  let timer = setTimeout(stop, SILENT_MS);
  try {
    const found = await answer(path, { Accept: "text/event-stream" }, abort.signal);
    const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let kept = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the service has ended the connection");
      clearTimeout(timer);
      timer = setTimeout(stop, SILENT_MS);
      const events = (kept + value).split("\n\n");
      kept = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) heard(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    stop();
  }
}
