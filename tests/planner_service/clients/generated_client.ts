// Uses the types that openapi-typescript has made, with openapi-fetch, as the owner of a CI would.
// node generated_client.js URL TOKEN: it ends with an error at the first answer that is not what its type says.
import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type Schemas = components["schemas"];
type Operations = Record<string, { requestBody?: { content: Record<string, { examples: Record<string, { value: unknown }> }> } }>;

const [url, token] = process.argv.slice(2) as [string, string];
const headers = { Authorization: `Bearer ${token}` };
const service = createClient<paths>({ baseUrl: url, headers });
const description: { paths: Record<string, Operations> } = await (await fetch(`${url}/openapi.json`, { headers })).json();

function example<Body>(path: string): Body {
  const examples = description.paths[path]?.post?.requestBody?.content["application/json"]?.examples ?? {};
  return Object.values(examples)[0]?.value as Body;
}

function read<Data>(answer: { data?: Data; error?: Schemas["Problem"]; response: Response }): Data {
  assert.equal(answer.error, undefined, `${answer.response.url}: ${answer.error?.detail}`);
  assert.notEqual(answer.data, undefined, `${answer.response.url}: nothing is read`);
  return answer.data as Data;
}

const profile = read(await service.POST("/v1/profiles", { body: example<Schemas["Profile"]>("/v1/profiles") }));
const cluster = read(await service.POST("/v1/clusters", { body: example<Schemas["Cluster"]>("/v1/clusters") }));
const plans: string[] = [];
for (const batch_size of [16, 32]) {
  const body = { profile_id: profile.id, cluster_id: cluster.id, planner: "pipedream-2bw", batch_size };
  const answer = read(await service.POST("/v1/plans", { body }));
  assert("feasible" in answer && answer.feasible, "a plan, neither a job nor a refusal");
  const throughput: number | null = answer.throughput_samples_per_s;
  assert(throughput !== null && throughput > 0);
  plans.push(answer.id);
}
const job = read(
  await service.POST("/v1/plans", {
    params: { header: { Prefer: "respond-async" } },
    body: { profile_id: profile.id, cluster_id: cluster.id, planner: "pipedream", batch_size: 8 },
  }),
);
assert("state" in job && job.task.kind === "plan");

const [first, second] = plans as [string, string];
const plan = read(await service.GET("/v1/plans/{plan_id}", { params: { path: { plan_id: first } } }));
assert.equal(plan.stages.length, plan.depth);
const page = read(await service.GET("/v1/plans", { params: { query: { sort: "-throughput", limit: 1 } } }));
assert.equal(page.items.length, 1);
const rest = read(await service.GET("/v1/plans", { params: { query: { cursor: page.next_cursor ?? "", sort: "-throughput" } } }));
const listed = [...page.items, ...rest.items].map((one) => ("id" in one ? one.id : ""));
assert(plans.every((id) => listed.includes(id)));
const compared = read(await service.GET("/v1/plans/compare", { params: { query: { id: [first, second] } } }));
assert(compared.plans.map((one) => one.id).includes(compared.fastest));

const name = "team/gpt-prod";
const alias = read(await service.PUT("/v1/aliases/{name}", { params: { path: { name } }, body: { plan_id: first } }));
assert.equal(alias.plan_id, first);
const path = { plan_id: first, format_name: "torchrun" } as const;
const script = read(await service.GET("/v1/plans/{plan_id}/exports/{format_name}", { params: { path }, parseAs: "text" }));
assert(typeof script === "string" && script.includes("pipeplan-agent run"));

const jobs = read(await service.GET("/v1/jobs", { params: { query: { limit: 1 } } }));
assert.equal(jobs.items[0]?.id, job.id);
const missing = await service.GET("/v1/plans/{plan_id}", { params: { path: { plan_id: "0".repeat(32) } } });
assert.equal(missing.error?.status, 404);
const refused = await service.POST("/v1/plans", { body: { profile_id: "none", cluster_id: cluster.id, batch_size: 0 } });
assert.deepEqual(refused.error?.errors?.map((one) => one.field), ["batch_size"]);
