package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	appsvalidation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/policy"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
	policyvalidation "k8s.io/kubernetes/pkg/apis/policy/validation"
	"k8s.io/kubernetes/pkg/apis/rbac"
	_ "k8s.io/kubernetes/pkg/apis/rbac/install"
	rbacvalidation "k8s.io/kubernetes/pkg/apis/rbac/validation"
	podsecurity "k8s.io/pod-security-admission/api"
	podpolicy "k8s.io/pod-security-admission/policy"
)

// manifests reads documents of YAML and says what an API server would refuse in them, or warn about.
func manifests(input io.Reader) []string {
	codecs := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict)
	documents := yaml.NewYAMLReader(bufio.NewReader(input))
	var wrong []string
	for seen := 0; ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			if seen == 0 {
				wrong = append(wrong, "no manifest at all")
			}
			return wrong
		}
		if err != nil {
			return append(wrong, err.Error())
		}
		if blank(document) {
			continue
		}
		seen++
		object, kind, err := codecs.UniversalDecoder().Decode(document, nil, nil)
		if err != nil {
			wrong = append(wrong, fmt.Sprintf("manifest %d (%v): %v", seen, kind, err))
			continue
		}
		name, problems := judge(object)
		for _, problem := range problems {
			wrong = append(wrong, fmt.Sprintf("%s %s: %s", kind.Kind, name, problem))
		}
	}
}

// blank tells a document of comments and empty lines only, as helm makes of a template that renders nothing.
func blank(document []byte) bool {
	converted, err := yaml.ToJSON(document)
	return err == nil && string(converted) == "null"
}

// judge applies what the API server applies on creation; the name is the object's.
func judge(object runtime.Object) (string, []string) {
	switch made := object.(type) {
	case *core.ConfigMap:
		made.Namespace = "default"
		return made.Name, told(corevalidation.ValidateConfigMap(made))
	case *core.ServiceAccount:
		made.Namespace = "default"
		return made.Name, told(corevalidation.ValidateServiceAccount(made))
	case *apps.Deployment:
		made.Namespace = "default"
		problems := told(appsvalidation.ValidateDeployment(made, corevalidation.PodValidationOptions{}))
		return made.Name, append(problems, restricted(&made.Spec.Template)...)
	case *core.Pod:
		made.Namespace = "default"
		problems := told(corevalidation.ValidatePodCreate(made, corevalidation.PodValidationOptions{}))
		template := core.PodTemplateSpec{ObjectMeta: made.ObjectMeta, Spec: made.Spec}
		return made.Name, append(problems, restricted(&template)...)
	case *rbac.Role:
		made.Namespace = "default"
		return made.Name, told(rbacvalidation.ValidateRole(made))
	case *rbac.RoleBinding:
		made.Namespace = "default"
		return made.Name, told(rbacvalidation.ValidateRoleBinding(made))
	case *policy.PodDisruptionBudget:
		made.Namespace = "default"
		named := corevalidation.ValidateObjectMeta(
			&made.ObjectMeta, true, corevalidation.ValidatePodName, field.NewPath("metadata"))
		options := policyvalidation.PodDisruptionBudgetValidationOptions{}
		return made.Name, told(append(named, policyvalidation.ValidatePodDisruptionBudget(made, options)...))
	}
	return "", []string{"a kind that deploycheck has no validation for: add it to judge"}
}

func told(found field.ErrorList) []string {
	var lines []string
	for _, one := range found {
		lines = append(lines, one.Error())
	}
	return lines
}

// restricted holds a pod against the strictest of Kubernetes' pod security standards.
func restricted(template *core.PodTemplateSpec) []string {
	var pod corev1.PodSpec
	if err := legacyscheme.Scheme.Convert(&template.Spec, &pod, nil); err != nil {
		return []string{err.Error()}
	}
	evaluator, err := podpolicy.NewEvaluator(podpolicy.DefaultChecks())
	if err != nil {
		return []string{err.Error()}
	}
	level := podsecurity.LevelVersion{Level: podsecurity.LevelRestricted, Version: podsecurity.LatestVersion()}
	meta := metav1.ObjectMeta{Annotations: template.Annotations}
	var lines []string
	for _, result := range evaluator.EvaluatePod(level, &meta, &pod) {
		if !result.Allowed {
			lines = append(lines, fmt.Sprintf("restricted pods: %s: %s", result.ForbiddenReason, result.ForbiddenDetail))
		}
	}
	return lines
}
